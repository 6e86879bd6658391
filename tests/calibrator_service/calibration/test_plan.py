"""Choices that depend on the device and on the amount of text."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrator_service.calibration import plan as plan_module
from calibrator_service.calibration.plan import HeadTraining, head_training, num_decoded_rows, pass_sizes_for, resolve
from calibrator_service.calibration.spec import CalibrationSpec
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel, wrap_model
from tests.families import build_family

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def on_gpu(loaded: LoadedModel, memory_bytes: int, patch: pytest.MonkeyPatch) -> Any:
    """A stand-in for a model on a GPU with `memory_bytes` of memory."""
    properties = SimpleNamespace(total_memory=memory_bytes)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    model = SimpleNamespace(config=loaded.model.config, dtype=torch.bfloat16)
    return SimpleNamespace(model=model, device=GPU, num_layers=loaded.num_layers)


def test_rows_on_a_gpu_fit_a_quarter_of_its_memory(counting, monkeypatch):
    # Three layers of one head of 16 keys and values, two bytes each, for 512 tokens.
    row_bytes = 2 * 3 * 16 * 2 * 512
    few = on_gpu(counting, 4 * 300 * row_bytes, monkeypatch)
    assert num_decoded_rows(few) == 300
    assert num_decoded_rows(on_gpu(counting, 80 << 30, monkeypatch)) == 2048
    assert not pass_sizes_for(few).keeps_states
    assert num_decoded_rows(counting) == 64
    assert pass_sizes_for(counting).keeps_states


def test_rows_count_the_keys_of_each_kind_of_layer(monkeypatch):
    """Three layers have two heads of 8, three have one of 16."""
    loaded = wrap_model(build_family("gemma4"))
    row_bytes = 2 * (3 * 2 * 8 + 3 * 16) * 2 * 512
    assert num_decoded_rows(on_gpu(loaded, 4 * 300 * row_bytes, monkeypatch)) == 300


def test_more_text_means_fewer_epochs_and_on_a_gpu_larger_batches():
    def chosen(tokens: int, device: torch.device) -> tuple[int, int]:
        params = head_training(CalibrationSpec(max_tokens=tokens), device)
        return params.epochs, params.batch_size

    default = (HeadTraining().epochs, HeadTraining().batch_size)
    assert chosen(0, GPU) == chosen(52_000, GPU) == chosen(700_000, CPU) == default
    assert chosen(1_000_000, GPU) == (6, 1024)
    assert chosen(30_000_000, GPU) == (5, 4096)
    assert chosen(1_000_000_000, GPU) == (2, 4096)


def test_a_head_reads_states_of_three_depths(counting):
    plan = resolve(CalibrationSpec(), counting)
    assert plan.depths == (0,)
    assert plan.captured_depths(30) == (0, 10, 20)


def test_there_is_no_exit_whose_statistics_do_not_fit(monkeypatch):
    """By arithmetic: 8,192 wide states need about 35 GB."""
    loaded = wrap_model(build_family("llama"))
    size = loaded.hidden_size
    monkeypatch.setattr(plan_module, "available_bytes", lambda _: 500 * size**2)
    assert resolve(CalibrationSpec(), loaded).depths == ()
    assert "GB of memory" in resolve(CalibrationSpec(), loaded).left_out["depth-0"]
    monkeypatch.setattr(plan_module, "available_bytes", lambda _: 600 * size**2)
    assert resolve(CalibrationSpec(), loaded).depths == (0,)


def test_there_is_no_exit_where_the_lm_head_reads_states_of_another_width():
    loaded = wrap_model(build_family("opt"))
    plan = resolve(CalibrationSpec(), loaded)
    assert plan.depths == plan.captured_depths(loaded.num_layers) == ()
    assert "reads states of width" in plan.left_out["depth-0"]
    with pytest.raises(InvalidInput, match="reads states of width") as caught:
        resolve(CalibrationSpec(exit_depths=(0,)), loaded)
    assert caught.value.reason == "EXITS_NOT_SUPPORTED"
