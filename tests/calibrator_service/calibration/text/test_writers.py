"""A calibration writes with a copy in bfloat16 only where that is faster."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrator_service.calibration.plan import resolve
from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.spec import CalibrationSpec, TextFile
from calibrator_service.calibration.text import writers
from calibrator_service.calibration.text.writer import Pace, WriteRequest, write_all
from calibrator_service.calibration.text.writers import pays_for_copy, text_writer
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from tests.worker import save_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_model(tmp_path_factory.mktemp("model")), model_id="tiny")


@pytest.fixture(autouse=True)
def _fast_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": True})


def run_of(loaded: LoadedModel, folder: Path, **spec: Any) -> CalibrationRun:
    plan = resolve(CalibrationSpec(**spec), loaded)
    return CalibrationRun(loaded, plan, folder, lambda _: None, lambda: False)


@pytest.mark.parametrize(
    ("change", "spec", "pays"),
    [
        ({"load_s": 10.0}, {"time_budget_s": 150.0}, True),
        ({"load_s": 40.0}, {"time_budget_s": 150.0}, False),
        ({"load_s": 20.0}, {"time_budget_s": 3600.0}, True),
        ({}, {"max_tokens": 20_000}, True),
        ({}, {"max_tokens": 19_999}, False),
        ({"source": None}, {"time_budget_s": 3600.0}, False),
        ({"acceleration": None}, {"time_budget_s": 3600.0}, False),
        ({"compute_dtype": torch.bfloat16}, {"time_budget_s": 3600.0}, False),
    ],
)
def test_when_a_copy_pays(loaded, tmp_path, change, spec, pays):
    assert pays_for_copy(run_of(replace(loaded, **change), tmp_path, **spec)) is pays


def test_no_copy_on_a_processor_without_bfloat16_or_without_memory(loaded, tmp_path, monkeypatch):
    run = run_of(loaded, tmp_path, time_budget_s=3600.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
        assert not pays_for_copy(run)
    monkeypatch.setattr(writers, "available_bytes", lambda _: 1000)
    assert not pays_for_copy(run)


def test_the_text_of_a_copy_is_not_the_models_own_choice(loaded, tmp_path):
    run = run_of(loaded, tmp_path, max_tokens=20_000)
    requests = [WriteRequest((50, 60), 8)]
    with closing(text_writer(run)) as writer:
        [by_copy] = write_all(writer, requests, Pace())
    assert by_copy.tokens
    assert not by_copy.is_choice


def test_given_text_needs_no_copy_and_a_fleet_replaces_it(loaded, tmp_path):
    run = run_of(loaded, tmp_path, max_tokens=20_000, source=TextFile("a.txt"))
    with closing(text_writer(run)) as writer:
        [answer] = write_all(writer, [WriteRequest((50, 60), 8)], Pace())
    assert answer.is_choice
    fleet: Any = SimpleNamespace()
    assert text_writer(run_of(loaded, tmp_path, max_tokens=20_000), lambda _: fleet) is fleet
