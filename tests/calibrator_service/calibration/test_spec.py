"""The limits of a spec."""

from collections.abc import Callable
from typing import Any

import pytest

from calibrator_service.calibration.spec import CalibrationSpec, HubDataset, SelfGenerated, Source
from shared.errors import InvalidInput


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"time_budget_s": 0.0}, "time_budget"),
        ({"time_budget_s": float("inf")}, "time_budget"),
        ({"time_budget_s": float("nan")}, "time_budget"),
        ({"rung_depths": (1, 1)}, "rung_depths"),
        ({"rung_depths": (-1,)}, "rung_depths"),
        ({"rung_depths": tuple(range(65))}, "rung_depths"),
        ({"label": "other"}, "label"),
        ({"cosine_threshold": 0.0}, "cosine_threshold"),
        ({"draft_vocabulary_size": -1}, "draft_vocabulary_size"),
        ({"router_width": 0}, "router_width"),
        ({"router_width": 8193}, "router_width"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_limits(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        CalibrationSpec("tiny", **changes)
    assert caught.value.reason == "BAD_SPEC"
    assert caught.value.metadata == {"field": f"spec.{field}"}


@pytest.mark.parametrize(
    ("make_source", "reason"),
    [
        (lambda: SelfGenerated(max_new_tokens=65_537), "BAD_SPEC"),
        (lambda: SelfGenerated(("a", " ")), "EMPTY_PROMPT"),
        (lambda: HubDataset(" "), "BAD_SPEC"),
    ],
)
def test_limits_of_sources(make_source: Callable[[], Source], reason: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make_source()
    assert caught.value.reason == reason
