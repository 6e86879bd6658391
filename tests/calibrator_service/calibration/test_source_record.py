"""A manifest names the text of its calibration by digests and counts."""

import hashlib

import pytest

from calibrator_service.calibration.source_record import published_spec, source_record
from calibrator_service.calibration.spec import AnswerFile, CalibrationSpec, HubDataset, SelfGenerated
from shared.errors import NotFound

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
    with pytest.raises(NotFound) as raised:
        source_record(AnswerFile(str(tmp_path / name)))
    assert raised.value.reason == "FILE_NOT_FOUND"
