"""Quality against layers per token, for tokens that leave early for good and for layers left out of all tokens.

    python -m bench.skip --model DIR --answers FILE.jsonl [--tokens 6_000] [--depths 20 24 27] [--prompts 24] [--new-tokens 48]
        [--tables exits recorded written substitutes]

`--answers`: prompts and answers of the model, as `neap calibrate --answers` takes them; the maps are learnt from their states.
Judged on greedy answers to short first turns of Spec-Bench. Tables: how often exits agree with the full model; both kinds of
skipping on the full model's answers (`recorded`) and on answers of their own (`written`); what keys and values cost that are
substituted for those of tokens that left.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.machine import described
from bench.options import make_parser, parsed
from bench.prompts import DEFAULT_FILE, first_turns
from bench.skip.exits import Exit, Logits
from bench.skip.learnt import RANK, Learnt, without
from bench.skip.maps import Pair, StateMap
from bench.skip.passes import Policy, Skip, Substitute, Uniform
from bench.skip.scores import recorded, written
from bench.skip.text import full, recorded_batches
from calibrator_service.calibration.spec import AnswerFile
from calibrator_service.calibration.text.answers import answer_sequences
from calibrator_service.calibration.text.shards import TokenSequence
from shared.ladder.head_rows import gather_rows, projection
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.own_thread import run_in_own_thread

TABLES = ("exits", "recorded", "written", "substitutes")
MAX_PROMPT_TOKENS = 120
THRESHOLDS = (0.5, 0.8, 0.95)
WRITTEN_THRESHOLDS = (0.8, 0.95)
WRITTEN_DROPS = 3
SUBSTITUTES = ("own", f"rank {RANK}", "map", "last deep")


@dataclass(frozen=True)
class Sides:
    """The policies of one model."""

    runner: ContiguousRunner
    learnt: Learnt

    def substitutes(self, name: str) -> dict[Pair, Substitute] | None:
        """By name: the exit's state as it is, with a low-rank or a full linear correction, or None for the last deep state's."""
        kinds: dict[str, Callable[[Pair], Substitute]] = {
            "own": lambda _: lambda states: states,
            f"rank {RANK}": self.learnt.low_rank.__getitem__,
            "map": self.learnt.maps.__getitem__,
        }
        if name == "last deep":
            return None
        return {pair: kinds[name](pair) for pair in self.learnt.low_rank}

    def exits(self, depth: int, threshold: float = 0.0) -> dict[str, Exit]:
        """The exits of a depth by their form."""
        runner, tokens = self.runner, self.learnt.vocabulary
        to_last = self.learnt.maps[depth, runner.num_layers]
        project = projection(*gather_rows(runner.loaded.parts.head, tokens))

        def mapped(states: Tensor) -> Tensor:
            return runner.normed(to_last(states))

        forms: dict[str, tuple[Logits, Tensor | None]] = {
            "norm and head": (runner.logits, None),
            "map, norm and head": (lambda states: runner.logits(to_last(states)), None),
            "map, norm and draft rows": (lambda states: project(mapped(states)), tokens),
        }
        return {name: Exit(*form, threshold) for name, form in forms.items()}

    def skip(self, depth: int, threshold: float) -> Skip:
        leaving = self.exits(depth, threshold)["map, norm and draft rows"]
        return Skip({depth: leaving}, self.substitutes("map"))

    def uniform(self, most: int) -> Iterator[tuple[str, Uniform]]:
        """Leaving out at most `most` layers: the best block, the same with a map in its place, and evenly spaced ones."""
        for block in self.learnt.blocks:
            count = len(block)
            if count > most:
                continue
            patch: StateMap = self.learnt.maps[block.start, block.stop]
            even = [round((i + 1) * self.runner.num_layers / (count + 1)) for i in range(count)]
            name = f"without {block.start} to {block.stop - 1}"
            yield name, without(self.runner, block)
            yield f"{name}, mapped", without(self.runner, block, patch)
            yield f"without {', '.join(map(str, even))}", without(self.runner, even)


def show_exits(sides: Sides, answers: Sequence[TokenSequence]) -> None:
    """How often each form of exit proposes the full model's choice."""
    runner, depths = sides.runner, sorted(sides.learnt.depths)
    states: dict[int, list[Tensor]] = {depth: [] for depth in depths}
    expected = []
    for batch, chosen in recorded_batches(runner, answers):
        hidden, first = None, 0
        for depth in depths:
            hidden = runner.run_ragged(
                batch.ids, batch.sequences, first=first, last=depth, hidden=hidden
            )
            first = depth
            states[depth].append(hidden[0][chosen])
        expected.append(batch.ids[0].roll(-1)[chosen])
    choices = torch.cat(expected)
    print_head("depth", "exit", "agrees", *(f"{t:g}: leave / right" for t in THRESHOLDS))
    for depth in depths:
        for name, one in sides.exits(depth).items():
            tokens, probabilities = one.proposals(torch.cat(states[depth]))
            right = (tokens == choices).float()
            leaving = [probabilities >= threshold for threshold in THRESHOLDS]
            cells = [f"{some.float().mean():.3f} / {right[some].mean():.3f}" for some in leaving]
            print_row(depth, name, f"{right.mean():.3f}", *cells)


def show_recorded(sides: Sides, answers: Sequence[TokenSequence]) -> None:
    """Each policy reads the full model's answers."""
    print_head("policy", "layers per token", "agrees", "leave", "right of these", "right of those that stay")  # fmt: skip

    def show(name: str, policy: Policy) -> None:
        found = recorded(sides.runner, policy, answers)
        left = f"{found.left:.3f}" if found.share else ""
        print_row(
            name,
            f"{found.layers:.2f}",
            f"{found.agreement:.3f}",
            f"{found.share:.3f}",
            left,
            f"{found.deep:.3f}",
        )

    for depth in sides.learnt.depths:
        for threshold in THRESHOLDS:
            show(f"depth {depth} from {threshold:g}", sides.skip(depth, threshold))
    for name, policy in sides.uniform(sides.runner.num_layers):
        show(name, policy)


def show_written(sides: Sides, answers: Sequence[TokenSequence], new_tokens: int) -> None:
    """Each policy answers the prompts, and the full model judges."""
    runner, prompts = sides.runner, [one.prompt for one in answers]
    print_head("policy", "layers per token", "the full model's choice", "perplexity under it", "same answers")  # fmt: skip

    def show(name: str, policy: Policy) -> None:
        found = written(runner, policy, prompts, new_tokens)
        same = sum(own == other for own, other in zip(found.answers, answers, strict=True))
        print_row(
            name,
            f"{found.layers:.2f}",
            f"{found.agreement:.3f}",
            f"{math.exp(found.surprise):.3f}",
            f"{same} of {len(prompts)}",
        )

    show("full", full(runner))
    for depth in sides.learnt.depths:
        for threshold in WRITTEN_THRESHOLDS:
            show(f"depth {depth} from {threshold:g}", sides.skip(depth, threshold))
    for name, policy in sides.uniform(WRITTEN_DROPS):
        show(name, policy)


def show_substitutes(sides: Sides, answers: Sequence[TokenSequence]) -> None:
    """Half of the answers' tokens leave whatever they say, or all of the prompts'. What do the others choose?"""
    runner = sides.runner
    print_head("depth", "keys and values of", "answers leave: the others agree", "prompts leave: answers agree")  # fmt: skip
    for depth in sides.learnt.depths:
        for name in SUBSTITUTES:
            cells = []
            for share, prompts_leave in ((0.5, False), (1.0, True)):
                torch.manual_seed(0)
                policy = Skip({depth: partial(at_random, share)}, sides.substitutes(name))
                found = recorded(runner, policy, answers, prompts_leave=prompts_leave)
                cells.append(f"{found.deep:.3f}")
            print_row(depth, name, *cells)


def at_random(share: float, states: Tensor) -> tuple[Tensor, Tensor]:
    """An `Ask`: any token leaves with probability `share`."""
    return torch.zeros(len(states), dtype=torch.long), torch.rand(len(states)) < share


def print_head(*cells: str) -> None:
    print()
    print_row(*cells)
    print("|" + "---|" * len(cells), flush=True)


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def text_of(loaded: LoadedModel, path: Path) -> list[TokenSequence]:
    """The answers in a file, in random order."""
    found = [one for one in answer_sequences(loaded, AnswerFile(str(path))) if one.answer_start]
    random.Random(0).shuffle(found)
    return found


def measure(options: argparse.Namespace) -> None:
    runner = ContiguousRunner(load_model(options.model))
    text = text_of(runner.loaded, options.answers)
    learnt = Learnt.of(runner, text, options.depths, options.tokens)
    sides = Sides(runner, learnt)
    turns = first_turns(runner.loaded, DEFAULT_FILE, 0)
    prompts = [turn for turn in turns if len(turn) <= MAX_PROMPT_TOKENS][: options.prompts]
    answers = written(runner, full(runner), prompts, options.new_tokens).answers
    num_tokens = sum(one.num_answer_tokens for one in answers)
    print(
        f"maps learnt from {learnt.num_tokens} answer tokens and their prompts; {len(learnt.vocabulary)} draft rows; "
        f"judged on {len(prompts)} prompts, {num_tokens} tokens",
        flush=True,
    )
    tables: dict[str, Callable[[], None]] = {
        "exits": lambda: show_exits(sides, answers),
        "recorded": lambda: show_recorded(sides, answers),
        "written": lambda: show_written(sides, answers, options.new_tokens),
        "substitutes": lambda: show_substitutes(sides, answers),
    }
    for name in options.tables:
        tables[name]()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=6_000, help="of answers, to learn from")
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 24, 27])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    options = parsed(parser)
    print(described("cpu"), flush=True)
    run_in_own_thread(measure, options)


if __name__ == "__main__":
    main()
