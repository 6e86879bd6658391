"""Names that are not datasets of the Hub are refused without a request to the Hub."""

from types import SimpleNamespace
from typing import Any

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb

from calibrator_service.hub_datasets import check_allowed, check_hub_dataset, is_public_only
from calibrator_service.job import JobState
from calibrator_service.job_process import ProcessConfig
from calibrator_service.worker_process import run_job
from shared.calibrator_settings import CalibratorSettings
from shared.errors import InvalidInput
from tests.reasons import raises

PATHS = [
    *("", ".", "..", "/etc", "/etc/passwd", "./data", "../data", "data/../x", "~", "~/data"),
    *("a/b/c", "a/", "/a", "a//b", "a\\b", ".\\a", "C:\\a", "a/..", "./.", "_/_", "a b", "a\nb"),
    *("hf://datasets/a/b", "https://host/a", "file:///etc", "s3://b/k", "x::y", "a/b@c", "a\x00b"),
    *("buckets/a/b", "a--b", "x" * 97),
]


@pytest.mark.parametrize("name", PATHS)
def test_paths_and_urls_are_refused(name):
    with raises(InvalidInput, "BAD_DATASET_NAME"):
        check_hub_dataset(name)


def test_names_of_file_readers_are_refused():
    from datasets import packaged_modules

    for reader in packaged_modules._PACKAGED_DATASETS_MODULES:
        with pytest.raises(InvalidInput, match="file reader"):
            check_hub_dataset(reader)


@pytest.mark.parametrize(
    ("part", "value"),
    [("split", "train[:10%]"), ("split", "train+test"), ("split", "../x"), ("config", "a\nb"), ("field", "\x00")],
)
def test_invalid_config_split_and_field_are_refused(part, value):
    with raises(InvalidInput, f"BAD_DATASET_{part.upper()}"):
        check_hub_dataset("owner/name", **{part: value})


@pytest.mark.parametrize("name", ["wikitext", "Salesforce/wikitext", "a/b.c_d-e"])
def test_valid_names_are_accepted(name):
    check_hub_dataset(name, config="wikitext-103-raw-v1", split="validation.clean", field="text")


def test_only_allowed_datasets_are_read():
    check_allowed("a/b", ["c/d", "a/*"])
    check_allowed("a/b", ["*"])
    for patterns in ([], ["b/*"], ["A/b"]):
        with raises(InvalidInput, "DATASET_NOT_ALLOWED"):
            check_allowed("a/b", patterns)
    assert is_public_only("a/b", ["*"])
    assert is_public_only("a/b", ["*", "c/d"])
    assert not is_public_only("a/b", ["*", "a/b"])


@pytest.mark.parametrize(
    ("name", "allowed", "reason"), [("a/b", ("c/*",), "DATASET_NOT_ALLOWED"), ("./here", ("*",), "BAD_DATASET_NAME")]
)
def test_a_job_checks_its_dataset_again(tmp_path, name, allowed, reason):
    """Another version of the service or other settings may have created the job."""
    settings = CalibratorSettings(hub_datasets=allowed)
    spec = pb.CalibrationSpec(model_id="tiny", hub_dataset=pb.HubDataset(name=name)).SerializeToString()
    link: Any = SimpleNamespace(progress=lambda _: None)
    ended = run_job(ProcessConfig("cal-1", 1, 1, spec, tmp_path, settings), link)
    assert (ended.state, ended.reason) == (JobState.FAILED, reason)
