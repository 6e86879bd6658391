"""How settings say that a model is loaded."""

import torch

from shared.calibrator_settings import CalibratorSettings
from shared.configured_model import load_options
from shared.worker_settings import WorkerSettings


def test_both_services_choose_the_dtype_of_matmuls() -> None:
    for kind in (CalibratorSettings, WorkerSettings):
        assert load_options(kind(compute_dtype="bfloat16"))["compute_dtype"] == torch.bfloat16
        assert load_options(kind())["compute_dtype"] is None


def test_only_a_worker_keeps_keys_and_values_for_long() -> None:
    assert load_options(WorkerSettings(kv_dtype="float16"))["kv_dtype"] == torch.float16
    assert "kv_dtype" not in load_options(CalibratorSettings())
