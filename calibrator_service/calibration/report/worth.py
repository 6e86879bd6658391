"""Which exits would not pay: what they get right on held-out text against what asking them costs on this machine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog

from calibrator_service.calibration.report.held_out import LEAST_POSITIONS, wilson_interval
from calibrator_service.calibration.run import CalibrationRun
from shared.engine.drafting.costs import exit_timings, finished, verify_timings
from shared.engine.drafting.pass_costs import PassCosts, call_gain_s
from shared.ladder.exits import LayerExit
from shared.ladder.ladder import Ladder
from shared.model.contiguous_runner import ContiguousRunner

log = structlog.get_logger("neap.calibration")

# One-sided confidence of 95 %.
CONFIDENCE_Z = 1.645


def without_unpaid(
    run: CalibrationRun, runner: ContiguousRunner, ladder: Ladder, report: Mapping[str, Any], *, is_child: bool = False
) -> tuple[Ladder, dict[str, str]]:
    """The ladder without the exits that would not pay, and name -> why, of those.

    `report`: see `held_out_report`. An exit must agree more often than the report split's commonest token, by the lower
    end of Wilson's interval. Positions of one text are not independent, so that end is somewhat too high. An exit that
    the spec does not name must also save more than it costs on this machine, where the tables do not help. One that the
    spec names may be meant for another machine. Few positions are no reason against the exits of a child (`is_child`):
    most of what they know is from its parent's text. Raises `Cancelled`.
    """
    reasons: dict[str, str] = {}
    for layer_exit in ladder.exits:
        figures = report["proposers"][layer_exit.name]
        if is_child and figures["positions"] < LEAST_POSITIONS:
            continue
        if why := _why_unproven(figures, report["commonest_token"]):
            reasons[layer_exit.name] = why
    proven = tuple(layer_exit for layer_exit in ladder.exits if layer_exit.name not in reasons)
    if proven and not run.spec.exit_depths:
        costs = measured_costs(run, runner, with_exits(ladder, proven))
        for index, layer_exit in enumerate(proven):
            figures = report["proposers"][layer_exit.name]
            if figures["positions"] < LEAST_POSITIONS:
                continue
            if why := _why_too_slow(figures, costs, index):
                reasons[layer_exit.name] = why
    for name, why in reasons.items():
        log.info("an exit is left out", proposer=name, why=why)
    paying = tuple(layer_exit for layer_exit in proven if layer_exit.name not in reasons)
    return with_exits(ladder, paying), reasons


def with_exits(ladder: Ladder, exits: tuple[LayerExit, ...]) -> Ladder:
    """The ladder with these exits only. Without any it has no draft vocabulary."""
    return replace(ladder, exits=exits, draft_vocabulary=ladder.draft_vocabulary if exits else None)


def measured_costs(run: CalibrationRun, runner: ContiguousRunner, ladder: Ladder, *, most_tokens: int = 2) -> PassCosts:
    """What passes over one to `most_tokens` tokens and the exits of `ladder` cost here at the least.
    Raises `Cancelled`.

    The least of the repeats, because another process that runs now would make an exit, which waits for all threads
    several times in a fraction of a millisecond, seem five times as expensive. Workers measure for themselves whether
    to ask it.
    """

    def between() -> None:
        run.report("evaluating", 0.99)

    verify = finished(verify_timings(runner, most_tokens=most_tokens), between)
    timings = exit_timings(runner, ladder.bind(runner))
    while True:
        try:
            next(timings)
        except StopIteration as stop:
            return PassCosts(verify, exits=stop.value)
        between()


def _why_unproven(figures: Mapping[str, Any], commonest: float) -> str:
    count, share = int(figures["positions"]), float(figures["agreement_1"])
    if count < LEAST_POSITIONS:
        return f"{count} held-out positions are too few to know how often it agrees with the model"
    if wilson_interval(round(share * count), count, CONFIDENCE_Z)[0] > commonest:
        return ""
    return (
        f"it agrees with the model on {share:.1%} of {count} held-out positions, and always naming the commonest token "
        f"on {commonest:.1%}"
    )


def _why_too_slow(figures: Mapping[str, Any], costs: PassCosts, index: int) -> str:
    share = float(figures["agreement_1_beside_tables"])
    cost = costs.exits[index]
    gain_s, cost_s = call_gain_s(costs, cost, share), cost.alone_s
    if gain_s > cost_s:
        return ""
    return (
        f"it would not pay here: where the tables do not help it agrees on {share:.1%}, which saves "
        f"{max(gain_s, 0.0) * 1e3:.3g} ms per question, and a question costs {cost_s * 1e3:.3g} ms"
    )
