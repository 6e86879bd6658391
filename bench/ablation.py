"""What each rule and learner of drafting is worth: `exact` with all of them, without one of them, and without any.

    python -m bench.ablation --model DIR --router FOLDER [--dtype float32] [--batch 1 4 16] [--per-task 4] [--rounds 2]
        [--without "planned lengths" "exits"] [--device cuda]

Closed loops keep B requests running (`bench.batch`), greedy, at most 64 new tokens, prompts from the prefix cache. All
sides answer the same 2 * B prompts in turn, in an order that rotates, then the next 2 * B. Each has a copy of the
router, so each learns for itself; the first round is not timed. An answer that differs from the one at full depth ends
the program. Printed: tokens per second as shares of those of `exact` with everything for the same prompts, medians over
prompts and rounds.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from bench.batch import closed_loop
from bench.machine import described
from bench.options import add_device, add_dtypes, add_prompts, each_model, load, make_parser
from bench.prompts import first_turns
from bench.table import head, row
from shared.engine.drafting.drafter import Drafter
from shared.engine.engine import Engine
from shared.engine.memory.budget import MAX_RUNNING
from shared.engine.request.request import GenerationRequest
from shared.ladder.confidence import Confidence
from shared.ladder.folder import read_ladder
from shared.ladder.joint_weights import CASES, JointWeights
from shared.ladder.ladder import Ladder
from shared.ops.drafting import Step

FULL, ALL, NONE = "full", "all", "none"


def forgetful(drafter: Drafter, request: GenerationRequest) -> Confidence:
    """What no earlier request has taught."""
    assert drafter.ladder is not None
    return Confidence(drafter.ladder.joint_weights, drafter.ladder.names)


# In which no draft's probability depends on another one.
EACH_ALONE = JointWeights(*[(0.0, 1.0, 0.0)] * len(CASES))


def without_weights(folder: Any) -> Ladder:
    return dataclasses.replace(read_ladder(folder), joint_weights=EACH_ALONE)


# Where each rule or learner is, and what stands in its place.
WITHOUT: dict[str, tuple[Any, str, Any]] = {
    "corrected probabilities": (Drafter, "confidence", forgetful),
    "planned lengths": (Step, "plan", lambda step: [len(chain.tokens) for chain in step.read()]),
}
# What takes another router.
EXITS, OTHERS = "exits", "what other proposers say"


@contextmanager
def without(names: Sequence[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(*WITHOUT[name]))
        yield


def sides_of(folder: Any) -> dict[str, tuple[Ladder | None, Sequence[str]]]:
    """By name: a router, and what is left out."""
    found: dict[str, tuple[Ladder | None, Sequence[str]]] = {FULL: (None, ())}
    found[ALL] = read_ladder(folder), ()
    for name in WITHOUT:
        found[f"without {name}"] = read_ladder(folder), [name]
    tables = dataclasses.replace(read_ladder(folder), exits=(), draft_vocabulary=None)
    found[f"without {EXITS}"] = tables, ()
    found[f"without {OTHERS}"] = without_weights(folder), ()
    found[NONE] = without_weights(folder), [*WITHOUT]
    return found


def turned(names: list[str], number: int) -> list[str]:
    """The names in order, beginning somewhere else for each `number`."""
    first = 5 * number % len(names)
    return names[first:] + names[:first]


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_device(parser)
    add_prompts(parser, 4)
    add_dtypes(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=2)
    left_out = [*WITHOUT, EXITS, OTHERS]
    parser.add_argument("--without", nargs="+", choices=left_out, help="default: each, and none")
    for options in each_model(parser):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Prints the table of one model."""
    loaded = load(options)
    sides = sides_of(options.router)
    if options.without:
        left = [FULL, ALL, *(f"without {name}" for name in options.without)]
        sides = {name: sides[name] for name in left}
    shares: dict[tuple[str, int], list[float]] = {}
    with Engine(loaded, max_running=max(MAX_RUNNING, *options.batch)) as engine:
        prompts = first_turns(loaded, options.prompts, options.per_task)
        if len(prompts) < 2 * max(options.batch):
            raise SystemExit(f"{len(prompts)} prompts are too few for batch {max(options.batch)}")
        expected = closed_loop(engine, "full", None, prompts, 1)[1]
        turn = 0
        for number in range(options.rounds + 1):  # the first one learns, and is not timed
            for batch in options.batch:
                for place in range(0, len(prompts) - 2 * batch + 1, 2 * batch):
                    own = slice(place, place + 2 * batch)
                    rates: dict[str, float] = {}
                    turn += 1
                    for name in turned(list(sides), turn):
                        ladder, left_out = sides[name]
                        with without(left_out):
                            policy: Any = "exact" if ladder else "full"
                            loop = closed_loop(engine, policy, ladder, prompts[own], batch)
                        rates[name], answers = loop
                        if answers != expected[own]:
                            raise SystemExit(f"{name} at batch {batch} has other answers")
                    if number:
                        for name, rate in rates.items():
                            shares.setdefault((name, batch), []).append(rate / rates[ALL])
            print(f"round {number} of {options.rounds}", flush=True)
    print(described(options.device), loaded.model.dtype, loaded.compute_dtype)
    head("side", *(f"batch {batch}" for batch in options.batch))
    for name in sides:
        row(name, *(f"{statistics.median(shares[name, batch]):.3f}" for batch in options.batch))


if __name__ == "__main__":
    main()
