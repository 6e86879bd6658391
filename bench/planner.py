"""Simulates the planner, fixed draft lengths and fixed thresholds on recorded answers.

    python -m bench.planner --model DIR --router FOLDER [--per-task 3] [--batch 1 4 8 16]

The model answers each prompt once, at full depth, so it is known which drafts would be accepted. Every strategy sees the same drafts
and is charged the measured costs of passes on this device. Only the suffix and successor rungs draft, because the recording does not
hold the states that an exit would need after a wrong draft. Reported is the speed-up of the whole batch over plain decoding at the
same batch size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.machine import described
from bench.options import add_prompts, make_parser, parsed
from bench.prompts import first_turns
from inference_service.evaluate.sides import neap
from shared.engine.drafting.costs import measure_deep, measure_wide
from shared.engine.drafting.planner import (
    MIN_SURVIVAL,
    REQUEST_WEIGHT,
    SERVED_WEIGHT,
    PassCosts,
    Reliability,
    best_lengths,
)
from shared.engine.engine import Engine
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import Ladder, SequenceDrafter
from shared.ladder.policy import DepthPolicy
from shared.ladder.rungs import Draft
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.own_thread import run_in_own_thread

MAX_TOKENS = 64
FIXED = range(1, 7)
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Trace:
    """A prompt and the full model's answer, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Replay:
    """Replays one recorded answer. The prefill has produced its first token already."""

    def __init__(self, trace: Trace, ladder: Ladder, served: Reliability) -> None:
        self.reliability = Reliability(REQUEST_WEIGHT, parent=served)
        self._answer = trace.answer
        self._drafter = SequenceDrafter(ladder, [*trace.prompt, trace.answer[0]])
        self._done = 1

    @property
    def num_left(self) -> int:
        return len(self._answer) - self._done

    def drafts(self, max_drafts: int) -> list[Draft]:
        """Up to `max_drafts` chained drafts, while the probability that all of them are right is at least MIN_SURVIVAL."""
        drafts: list[Draft] = []
        survival = 1.0
        while len(drafts) < min(max_drafts, self.num_left - 1) and survival >= MIN_SURVIVAL:
            draft = self._drafter.table_draft([draft.token for draft in drafts])
            if draft is None:
                break
            drafts.append(draft)
            survival *= draft.probability
        return drafts

    def num_right(self, drafts: Sequence[Draft]) -> int:
        """How many drafts from the first on equal the full model's choices."""
        expected = self._answer[self._done :]
        pairs = enumerate(zip(drafts, expected, strict=False))
        return next((i for i, (draft, token) in pairs if draft.token != token), len(drafts))

    def settle(self, drafts: Sequence[Draft]) -> int:
        """Runs a deep pass over `drafts`: accepts the right ones and adds one token. Returns the number of new tokens."""
        num_right = self.num_right(drafts)
        self.reliability.record(drafts, num_right)
        final = self._answer[self._done : self._done + num_right + 1]
        self._drafter.append(final)
        self._done += len(final)
        return len(final)


# The drafts of each sequence -> how many of them the next pass verifies.
Strategy = Callable[[Sequence[Replay], Sequence[Sequence[Draft]], PassCosts], list[int]]


def fixed(
    length: int, _: Sequence[Replay], chains: Sequence[Sequence[Draft]], costs: PassCosts
) -> list[int]:
    """Always `length` drafts."""
    return [min(length, len(chain)) for chain in chains]


def threshold(
    least: float, _: Sequence[Replay], chains: Sequence[Sequence[Draft]], costs: PassCosts
) -> list[int]:
    """Drafts up to the first with a router probability below `least`."""
    return [
        next((i for i, draft in enumerate(chain) if draft.probability < least), len(chain))
        for chain in chains
    ]


def planner(
    replays: Sequence[Replay], chains: Sequence[Sequence[Draft]], costs: PassCosts
) -> list[int]:
    """The engine's planner."""
    probabilities = [
        [replay.reliability.adjusted(draft) for draft in chain]
        for replay, chain in zip(replays, chains, strict=True)
    ]
    return best_lengths(probabilities, costs)


def omniscient(
    replays: Sequence[Replay], chains: Sequence[Sequence[Draft]], costs: PassCosts
) -> list[int]:
    """Exactly the drafts that will be accepted: an upper bound for every strategy with these drafts."""
    return [replay.num_right(chain) for replay, chain in zip(replays, chains, strict=True)]


def simulate(
    traces: Sequence[Trace], ladder: Ladder, costs: PassCosts, batch: int, strategy: Strategy
) -> float:
    """Simulated tokens per second with `batch` answers running at once."""
    served = Reliability(SERVED_WEIGHT)
    waiting = [Replay(trace, ladder, served) for trace in reversed(traces)]
    running: list[Replay] = []
    num_tokens, seconds = 0, 0.0
    # Stops when the batch can no longer be filled: a smaller batch has another speed.
    while waiting or len(running) >= batch:
        while waiting and len(running) < batch:
            running.append(waiting.pop())
        chains = [replay.drafts(costs.max_drafts) for replay in running]
        lengths = strategy(running, chains, costs)
        seconds += costs.of_pass(len(running) + sum(lengths))
        for replay, chain, length in zip(running, chains, lengths, strict=True):
            num_tokens += replay.settle(chain[:length])
        running = [replay for replay in running if replay.num_left]
    return num_tokens / seconds


def record(loaded: LoadedModel, file: Path, per_task: int) -> list[Trace]:
    """Answers of the prompts in `file` at full depth, except those of a single token. Tasks alternate."""
    traces: list[Trace] = []
    with Engine(loaded, prefix_cache_bytes=0) as engine:
        side = neap(engine, DepthPolicy("full"), None, MAX_TOKENS)
        for ids in first_turns(loaded, file, per_task):
            traces.append(Trace(tuple(ids), side(list(ids)).token_ids))
    return [trace for trace in traces if len(trace.answer) > 1]


def measure_costs(loaded: LoadedModel) -> PassCosts:
    """The costs of passes on this device, measured as the engine does at start-up."""
    runner = ContiguousRunner(loaded)
    deep = measure_deep(runner)
    return PassCosts(deep, wide=measure_wide(runner, deep))


def main() -> None:
    parser = make_parser(__doc__, router=True)
    add_prompts(parser, 10)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16])
    options = parsed(parser)
    loaded = load_model(options.model)
    ladder = replace(read_ladder(options.router), exits=(), draft_vocabulary=None)
    costs = run_in_own_thread(measure_costs, loaded)
    traces = record(loaded, options.prompts, options.per_task)
    strategies: dict[str, Strategy] = {
        **{f"always {length}": partial(fixed, length) for length in FIXED},
        **{f"while p >= {least}": partial(threshold, least) for least in THRESHOLDS},
        "planner": planner,
        "knowing the answer": omniscient,
    }
    print(f"{described('cpu')}, {len(traces)} answers")
    points = [(n, costs.of_pass(n)) for n in (1, 2, 4, 8, 16, 32, 64)]
    print("a pass over n tokens, ms: " + ", ".join(f"{n}: {1000 * s:.1f}" for n, s in points))
    print("| strategy | " + " | ".join(f"batch {batch}" for batch in options.batch) + " |")
    print("|---" * (len(options.batch) + 1) + "|")
    plain = {b: simulate(traces, ladder, costs, b, partial(fixed, 0)) for b in options.batch}
    for name, strategy in strategies.items():
        ratios = [simulate(traces, ladder, costs, b, strategy) / plain[b] for b in options.batch]
        print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |", flush=True)


if __name__ == "__main__":
    main()
