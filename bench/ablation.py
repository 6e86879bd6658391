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
from shared.engine import step
from shared.engine.drafting import builder, chains
from shared.engine.drafting.confidence import Confidence
from shared.engine.drafting.planner import MIN_SURVIVAL
from shared.engine.engine import MAX_RUNNING, Engine
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import Ladder
from shared.ladder.proposers import Draft

FULL, ALL, NONE = "full", "all", "none"


def all_drafts(chains: Sequence[Sequence[float]], *_: Any, **__: Any) -> list[int]:
    """A plan that verifies everything."""
    return [len(chain) for chain in chains]


def each_alone(_: Confidence, drafts: Sequence[Draft]) -> Iterator[tuple[Draft, str, float]]:
    """The most probable draft of each token, as its own confidence head rates it."""
    best: dict[int, Draft] = {}
    for draft in sorted(drafts, key=lambda one: one.probability):
        best[draft.token] = draft
    for draft in best.values():
        yield draft, "", draft.probability


# Where each rule or learner is, and what stands in its place.
WITHOUT: dict[str, tuple[Any, str, Any]] = {
    "what other proposers say": (Confidence, "_combined", each_alone),
    "corrected probabilities": (Confidence, "_ratio", lambda self, case, proposer: 1.0),
    "exits asked if they pay": (chains, "exit_gain_s", lambda *_: 1.0),
    "no look-up that cannot pay": (builder, "least_survival", lambda *_: MIN_SURVIVAL),
    "planned lengths": (step, "best_lengths", all_drafts),
}
# What takes another router: it has no exits.
EXITS = "exits"


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
    # Exits that are always asked would not be a policy without rules, but another one.
    left_out = [name for name in WITHOUT if name != "exits asked if they pay"]
    found[NONE] = read_ladder(folder), left_out
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
    left_out = [*WITHOUT, EXITS]
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
    with Engine(loaded, max_ladders=len(sides), max_running=max(MAX_RUNNING, *options.batch)) as engine:
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
