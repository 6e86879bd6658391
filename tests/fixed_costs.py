"""Costs that do not depend on how fast this machine is today."""

import pytest

from inference_service.engine import bindings, engine
from inference_service.engine.planner import ExitCost


def fix_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here drafting always pays."""
    monkeypatch.setattr(
        engine, "measure_deep", lambda runner: tuple(1.0 + 0.001 * n for n in range(9))
    )
    monkeypatch.setattr(engine, "measure_wide", lambda runner, deep: ())
    monkeypatch.setattr(
        bindings,
        "measure_exits",
        lambda runner, ladder: (ExitCost(0.001, 0.0001),) * len(ladder.depths),
    )
