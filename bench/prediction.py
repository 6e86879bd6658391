"""Predicted outputs: tokens per second of decoding, one request at a time, greedy.

An edit is a prompt, the full model's own answer to it, and a prediction: that answer with a share of its words replaced
by other words of it, left out, or doubled (a third each), tokenised anew. So the model makes the expected text again,
with edits, as an editor of a document does; how faithfully a model copies is not measured. Prompts whose answers are
shorter than two thirds of --max-tokens are left out. The wrong prediction is that of the edit before.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.machine import described
from bench.options import add_dtypes, add_prompts, each_model, load, make_parser
from bench.prompts import first_turns
from bench.table import head, row
from shared.engine.engine import Engine
from shared.engine.request.request import Generation
from shared.ladder.folder import read_ladder

FULL, ALONE, PREDICTED, WRONG = "full", "exact", "exact, predicted", "exact, wrong prediction"


@dataclass(frozen=True)
class Edit:
    prompt: tuple[int, ...]
    answer: Generation
    prediction: str


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_prompts(parser, per_task=0)
    add_dtypes(parser)
    parser.add_argument("--edits", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--changed", type=float, default=0.05, help="share of the words")
    parser.add_argument("--rounds", type=int, default=2, help="of which the faster one counts")
    for options in each_model(parser):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    loaded = load(options)
    with Engine(loaded, read_ladder(options.router)) as engine:
        edits = []
        for edit in _edits(engine, options):
            edits.append(edit)
            if len(edits) == options.edits:
                break
        seconds = dict.fromkeys((FULL, ALONE, PREDICTED, WRONG), 0.0)
        passes, accepted, size = dict.fromkeys(seconds, 0), dict.fromkeys(seconds, 0), 0
        for number, edit in enumerate(edits):
            size += len(edit.answer.token_ids) - 1
            given = {PREDICTED: edit.prediction, WRONG: edits[number - 1].prediction}
            runs: dict[str, list[Generation]] = {way: [] for way in seconds}
            for _ in range(options.rounds):
                for way, own in runs.items():
                    policy, prediction = "full" if way == FULL else "exact", given.get(way, "")
                    own.append(
                        engine.generate(
                            edit.prompt,
                            policy=policy,
                            prediction=prediction,
                            max_tokens=options.max_tokens,
                        )
                    )
                    assert own[-1].token_ids == edit.answer.token_ids, (
                        "exact gives the tokens of full"
                    )
            for way, own in runs.items():
                seconds[way] += min(one.finished.decode_s for one in own)
                passes[way] += own[-1].stats.num_verify_passes
                accepted[way] += own[-1].finished.num_accepted_prediction_tokens
    print(described("cpu"))
    print(
        f"{len(edits)} edits, {size / len(edits):.0f} tokens, {options.changed:.0%} of the words changed"
    )
    head("", "tok/s", "of full", "tokens per verify pass", "of the answer in the prediction")
    for way, own in seconds.items():
        share = f"{accepted[way] / size:.0%}" if way in (PREDICTED, WRONG) else ""
        row(
            way,
            f"{size / own:.1f}",
            f"{seconds[FULL] / own:.2f}x",
            f"{size / passes[way]:.2f}",
            share,
        )


def _edits(engine: Engine, options: argparse.Namespace) -> Iterator[Edit]:
    for number, ids in enumerate(first_turns(engine.loaded, options.prompts, options.per_task)):
        answer = engine.generate(ids, policy="full", max_tokens=options.max_tokens)
        if 3 * len(answer.token_ids) >= 2 * options.max_tokens:
            yield Edit(tuple(ids), answer, edited(answer.text, options.changed, number))


def edited(text: str, share: float, seed: int) -> str:
    """The text with this share of its words replaced, left out or doubled."""
    draw = random.Random(seed)
    words = text.split(" ")
    kinds = (lambda _: [draw.choice(words)], lambda _: [], lambda word: [word, word])
    kept = [draw.choice(kinds)(word) if draw.random() < share else [word] for word in words]
    return " ".join(word for own in kept for word in own)


if __name__ == "__main__":
    main()
