"""The spec: its limits, and its stored form, which later builds must read."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from calibrator_service.calibration.spec import CalibrationSpec, HubDataset, SelfGenerated, Source, TextFile
from shared.errors import Corrupt, InvalidInput

# Written by version 0.1.0, but for the last: a store of version 1 has such texts.
STORED = {
    '{"cosine_threshold": 0.98, "draft_vocabulary_size": 0, "head_form": "gated", "label": "agreement", "max_tokens": '
    '0, "model_id": "tiny", "router_width": 128, "rung_depths": [1, 2], "seed": 0, "source": {"kind": "SelfGenerated", '
    '"max_new_tokens": 5, "prompts": ["a", "b"]}, "time_budget_s": 1.5}': CalibrationSpec(
        "tiny", SelfGenerated(("a", "b"), 5), time_budget_s=1.5, rung_depths=(1, 2)
    ),
    '{"cosine_threshold": 0.5, "draft_vocabulary_size": 7, "head_form": "affine", "label": "cosine", "max_tokens": 9, '
    '"model_id": "tiny", "router_width": 8, "rung_depths": [], "seed": 3, '
    '"source": {"field": "body", "kind": "TextFile", "path": "a.jsonl"}, "time_budget_s": null}': CalibrationSpec(
        "tiny",
        TextFile("a.jsonl", "body"),
        max_tokens=9,
        label="cosine",
        cosine_threshold=0.5,
        draft_vocabulary_size=7,
        router_width=8,
        seed=3,
    ),
    '{"cosine_threshold": 0.98, "draft_vocabulary_size": 0, "head_form": "gated", "label": "agreement", "max_tokens": '
    '0, "model_id": "tiny", "router_width": 128, "rung_depths": [], "seed": 0, "source": {"config": "c", "field": '
    '"text", "kind": "HubDataset", "name": "a/b", "split": "train"}, "time_budget_s": null}': CalibrationSpec(
        "tiny", HubDataset("a/b", "c")
    ),
    '{"cosine_threshold": 0.98, "draft_vocabulary_size": 0, "head_form": "gated", "label": "agreement", '
    '"learning_curve": true, "max_tokens": 0, "model_id": "", "router_width": 128, "rung_depths": [], "seed": 0, '
    '"source": {"kind": "SelfGenerated", "max_new_tokens": 0, "prompts": []}, "time_budget_s": '
    "null}": CalibrationSpec(),
}


@pytest.mark.parametrize("text", STORED)
def test_stored_forms_are_read(text: str) -> None:
    spec = STORED[text]
    assert CalibrationSpec.from_json(text) == spec
    assert CalibrationSpec.from_json(spec.to_json(), spec.prompts) == spec


def test_access_to_a_dataset_is_not_stored() -> None:
    spec = CalibrationSpec("tiny", HubDataset("a/b", public_only=True))
    assert spec.to_json() == CalibrationSpec("tiny", HubDataset("a/b")).to_json()


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


@pytest.mark.parametrize("change", [{"seed": -1}, {"unknown": 1}, {"source": {"kind": "Other"}}])
def test_a_stored_spec_that_this_build_cannot_use_is_corrupt(change: dict[str, Any]) -> None:
    record = {**json.loads(next(iter(STORED))), **change}
    with pytest.raises(Corrupt):
        CalibrationSpec.from_json(json.dumps(record))
