"""How good plans of drafts are, whatever else a machine computes: passes and exits have given costs.

    python -m bench.plans --model FILE --router FOLDER --pass-ms 1:35 8:68 16:115 64:403 [--exit-ms 3 .7 1.2]
        [--batch 1 8 16] [--per-task 4] [--rounds 2] [--last 250]

Closed loops keep B requests running (`bench.batch`), greedy, at most 64 new tokens. The planner is told that passes
over so many tokens take so long, and goes on to believe it. Costs are interpolated between those that are given. The
engine begins anew for each B, and what it learns of drafts is kept for the next round.

Printed for each round, of steps in which all B requests decode: the probability that the verified drafts were said to
have, the share of them that was right, and the speed over full depth that follows from the costs. Prompts have their
`--last` tokens, because reading them is most of a run.
"""

import argparse
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any
from unittest import mock

from bench.batch import closed_loop
from bench.options import add_device, add_dtypes, add_prompts, each_model, load, make_parser
from bench.prompts import first_turns
from bench.table import head, row
from shared.engine.drafting.costs import MAX_PASS_TOKENS, CostMeter
from shared.engine.drafting.drafter import Drafter, KeyTime
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.engine.drafting.speculation import Speculation
from shared.engine.engine import Engine
from shared.engine.step import Decoder
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import BoundLadder
from shared.model.runner import Runner
from shared.ops.chains import Chains

Point = tuple[int, float]


def point(text: str) -> Point:
    """(tokens, seconds) of TOKENS:MILLISECONDS. Raises ValueError."""
    tokens, milliseconds = text.split(":")
    return int(tokens), float(milliseconds) / 1e3


def costs_of(points: Sequence[Point]) -> PassCosts:
    """Of passes over 1 to 9 tokens on the lines between the points, the first of one token, and the points beyond."""
    (_, first_s), *wide = points
    known = PassCosts((first_s,), wide=tuple(wide))
    return PassCosts(tuple(map(known.pass_s, range(1, MAX_PASS_TOKENS + 1))), wide=known.wide)


@dataclass(frozen=True)
class GivenCosts(CostMeter):
    """Measures nothing."""

    passes: PassCosts
    exit: ExitCost

    def measure_passes(self, runner: Runner, **_: Any) -> PassCosts:
        return self.passes

    def measure_exits(
        self, runner: Runner, ladder: BoundLadder
    ) -> Generator[tuple[int, Chains], None, tuple[ExitCost, ...]]:
        yield from ()
        return (self.exit,) * len(ladder.depths)


@dataclass
class Tally:
    """Of the steps of one round."""

    costs: GivenCosts
    batch: int
    said: list[float] = field(default_factory=list)
    num_right: int = 0
    exact_s: float = 0.0
    full_s: float = 0.0
    exits_s: float = 0.0

    def add_call(self, num_chains: int, num_drafts: int) -> None:
        """A call of an exit in the step that is under way."""
        cost = self.costs.exit
        self.exits_s += cost.alone_s + (num_chains - 1) * cost.each_more_s + (num_drafts - 1) * cost.each_draft_s

    def add_step(self, parts: Sequence[Speculation], num_read: int) -> None:
        """A step whose drafts have been verified."""
        exits_s, self.exits_s = self.exits_s, 0.0
        verdicts = [part.verdict for part in parts if part.verdict is not None]
        if num_read or len(verdicts) < self.batch:
            return
        num_right = sum(verdict.num_accepted for verdict in verdicts)
        self.num_right += num_right
        for part in parts:
            self.said += accumulate(part.probabilities, mul)
        self.exact_s += exits_s + self.costs.passes.pass_s(sum(len(part.tokens) for part in parts))
        self.full_s += self.costs.passes.pass_s(self.batch) * (self.batch + num_right) / self.batch


def measure(options: argparse.Namespace) -> None:
    """Prints the table of one model."""
    alone_s, each_more_s, each_draft_s = (milliseconds / 1e3 for milliseconds in options.exit_ms)
    costs = GivenCosts(costs_of(options.pass_ms), ExitCost(alone_s, each_more_s, each_draft_s, MAX_PASS_TOKENS - 1))
    loaded, ladder = load(options), read_ladder(options.router)
    prompts = [ids[-options.last :] for ids in first_turns(loaded, options.prompts, options.per_task)]
    tally = Tally(costs, 1)
    verify, call = Decoder._verify_and_commit, Drafter.record_call

    def verified(decoder: Decoder, parts: Sequence[Speculation], num_read: int, *passed: Any) -> None:
        verify(decoder, parts, num_read, *passed)
        tally.add_step(parts, num_read)

    def called(drafter: Drafter, index: int, _: float, num_chains: int, num_drafts: int) -> None:
        tally.add_call(num_chains, num_drafts)

    head("requests at once", "round", "drafts", "said", "right", "exact / full")
    with (
        mock.patch.object(Decoder, verify.__name__, verified),
        mock.patch.object(Drafter, call.__name__, called),
        mock.patch.object(KeyTime, KeyTime.record.__name__),
    ):
        for batch in options.batch:
            with Engine(loaded, max_running=batch, cost_meter=costs) as engine:
                closed_loop(engine, "full", None, prompts, batch, 1)  # reads the prompts
                for number in range(options.rounds):
                    tally = Tally(costs, batch)
                    closed_loop(engine, "exact", ladder, prompts, batch)
                    count = max(len(tally.said), 1)
                    said, right = sum(tally.said) / count, tally.num_right / count
                    speed = tally.full_s / tally.exact_s
                    row(batch, number + 1, len(tally.said), f"{said:.2f}", f"{right:.2f}", f"{speed:.3f}")


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_device(parser)
    add_dtypes(parser)
    add_prompts(parser, 4)
    parser.add_argument(
        "--pass-ms", type=point, nargs="+", required=True, metavar="TOKENS:MS", help="of 1 and larger numbers"
    )
    parser.add_argument(
        "--exit-ms", type=float, nargs=3, default=[1.0, 0.2, 0.5], metavar=("ALONE", "CHAIN", "DRAFT"),
        help="of a call for one chain, and more for each further chain and each further draft",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--last", type=int, default=250, help="tokens of each prompt")
    for options in each_model(parser):
        options.pass_ms.sort()
        if len(options.pass_ms) < 2 or options.pass_ms[0][0] != 1:
            parser.error("--pass-ms needs the cost of one token and of at least one larger number")
        measure(options)


if __name__ == "__main__":
    main()
