"""Costs that do not depend on how fast this machine is today."""

from collections.abc import Generator

import pytest

from inference_service.engine import loop
from inference_service.engine.drafting import ladder_cache
from inference_service.engine.drafting.planner import ExitCost
from shared.ladder.ladder import BoundLadder
from shared.ladder.rungs import Draft
from shared.model.runner import Runner


def fix_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here drafting always pays."""
    monkeypatch.setattr(
        loop, "measure_deep", lambda runner, **_: tuple(1.0 + 0.001 * n for n in range(9))
    )
    monkeypatch.setattr(loop, "measure_wide", lambda runner, deep, **_: ())
    monkeypatch.setattr(ladder_cache, "exit_timings", _exit_timings)


def _exit_timings(
    runner: Runner, ladder: BoundLadder
) -> Generator[list[Draft], None, tuple[ExitCost, ...]]:
    yield from ()
    return (ExitCost(0.001, 0.0001),) * len(ladder.depths)
