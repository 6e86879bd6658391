"""The limits of a spec."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from calibrator_service.calibration.spec import (
    AnswerFile,
    CalibrationSpec,
    HubDataset,
    SelfGenerated,
    Source,
    published_spec,
    source_record,
)
from shared.errors import InvalidInput, NotFound
from tests.reasons import raises


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"time_budget_s": 0.0}, "time_budget"),
        ({"time_budget_s": float("inf")}, "time_budget"),
        ({"time_budget_s": float("nan")}, "time_budget"),
        ({"exit_depths": (1, 1)}, "exit_depths"),
        ({"exit_depths": (-1,)}, "exit_depths"),
        ({"exit_depths": tuple(range(65))}, "exit_depths"),
        ({"label": "other"}, "label"),
        ({"cosine_threshold": 0.0}, "cosine_threshold"),
        ({"draft_vocabulary_size": -1}, "draft_vocabulary_size"),
        ({"confidence_width": 0}, "confidence_width"),
        ({"confidence_width": 8193}, "confidence_width"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_limits(changes: dict[str, Any], field: str) -> None:
    with raises(InvalidInput, "BAD_SPEC") as caught:
        CalibrationSpec("tiny", **changes)
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
    with raises(InvalidInput, reason):
        make_source()


PROMPTS = ("the secret plan", "ein Gr\u00fc\u00dfen")
ENCODED = rb'["the secret plan","ein Gr\u00fc\u00dfen"]'
DIGEST = "sha256:" + hashlib.sha256(ENCODED).hexdigest()


def test_prompts_become_a_digest_and_a_count():
    record = source_record(SelfGenerated(PROMPTS, 7))
    assert record == {
        "kind": "SelfGenerated",
        "max_new_tokens": 7,
        "use_workers": False,
        "digest": DIGEST,
        "num_prompts": 2,
    }
    spec = published_spec(CalibrationSpec("/models/tiny", SelfGenerated(PROMPTS), seed=3), record)
    assert (spec["source"], spec["seed"]) == (record, 3)
    assert "/models" not in str(spec), "an id of the library may be a path"


def test_text_that_the_model_wrote_has_no_digest():
    assert source_record(SelfGenerated()) == {"kind": "SelfGenerated", "max_new_tokens": 0, "use_workers": False}


def test_a_dataset_keeps_its_name():
    record = source_record(HubDataset("owner/name", "en", public_only=True))
    assert record == {"kind": "HubDataset", "name": "owner/name", "config": "en", "split": "train", "field": "text"}


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_is_not_there_is_missed_at_once(tmp_path, name):
    with raises(NotFound, "FILE_NOT_FOUND"):
        source_record(AnswerFile(str(tmp_path / name)))
