"""How a model runs is described: on a CPU by what runs on our kernels, on a GPU by its runner."""

import pytest
import torch

from neap_engine.doctor import checks
from neap_engine.doctor.checks import described_acceleration, described_runner
from shared.model.footprint import footprint
from shared.model.load import load_model
from shared.model.loaded import wrap_model
from shared.model.runners import make_runner
from shared.service_settings import ModelSource
from shared.worker_settings import WorkerSettings
from tests.families import build_family
from tests.gguf_files import write_llama


def test_modules_that_keep_their_own_code_are_named():
    loaded = wrap_model(build_family("falcon"), accelerate=True)
    text = described_acceleration(loaded.acceleration, loaded)
    name, reason = next(iter(loaded.acceleration.left_alone.items()))
    assert f"modules keep their own code, such as {name}: {reason}" in text
    assert f"0 of {loaded.num_layers} layers run as one kernel" in text


def test_a_model_that_is_not_accelerated_has_no_report():
    assert wrap_model(build_family("llama")).acceleration is None


@pytest.mark.parametrize(("wanted", "status"), [("on", "broken"), ("auto", "ok"), ("off", "ok")])
@pytest.mark.parametrize("setting", ["record_passes", "compile_layers"])
def test_a_runner_that_does_not_do_what_a_setting_demands_is_broken(setting, wanted, status):
    runner = make_runner(wrap_model(build_family("llama")), 1 << 20)
    found, text = described_runner(runner, WorkerSettings(**{setting: wanted}))
    assert found == status
    assert "not layers compiled (only a GPU does this)" in text


@pytest.mark.parametrize(("free_mb", "status"), [(561, "ok"), (560, "broken")])
def test_what_a_worker_will_take_is_compared_with_what_is_free(monkeypatch, tmp_path, free_mb, status):
    file = write_llama(tmp_path / "tiny.gguf")
    source = ModelSource("tiny", str(file))
    monkeypatch.setattr(checks, "available_bytes", lambda _: free_mb * 1_000_000)
    found = checks.memory(source, WorkerSettings())
    assert (found.name, found.status, bool(found.advice)) == ("memory of tiny", status, status == "broken")
    assert found.facts["needed_mb"] == 480
    assert found.facts["first_start_mb"] == 560
    assert found.facts["free_mb"] == free_mb
    assert "keys and values: 1 kB a token, 0 MB for 128 tokens" in found.detail
    if status == "broken":
        monkeypatch.setattr(checks, "load_configured", lambda *_: pytest.fail("it is loaded"))
        assert checks.model(source, WorkerSettings()).status == "off"


@pytest.mark.parametrize("gguf", [True, False])
def test_what_a_worker_will_take_of_a_gpu(monkeypatch, tmp_path, gguf):
    """Two bytes a parameter, or the file's blocks."""
    model = build_family("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    source = write_llama(tmp_path / "tiny.gguf", width=1024, inner=2048) if gguf else tmp_path / "model"
    settings = WorkerSettings(device="cuda:1")
    assert checks.memory(ModelSource("tiny", str(source)), settings).status == "off"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert checks.memory(ModelSource("tiny", str(source)), settings).status == "off"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900 << 20, 4 << 30))
    found = checks.memory(ModelSource("tiny", str(source)), settings)
    read = footprint(source, torch.device("cuda:1"))
    assert read is not None
    loaded = load_model(source) if gguf else wrap_model(model)
    sixteen_bits = 2 * loaded.model.num_parameters()
    assert read.weights < 0.7 * sixteen_bits if gguf else read.weights == sixteen_bits
    assert found.facts["weights_mb"] == round(read.weights / 1e6)
    assert (found.status, "MB of the GPU" in found.detail) == (
        "ok" if found.facts["needed_mb"] < 943 else "broken",
        True,
    )


def test_what_is_not_known_beforehand_is_not_guessed(tmp_path):
    assert checks.memory(ModelSource("tiny", "owner/name"), WorkerSettings()).status == "off"
    config = build_family("llama").config
    config.quantization_config = {"quant_method": "bitnet"}
    config.save_pretrained(tmp_path)
    assert checks.memory(ModelSource("tiny", str(tmp_path)), WorkerSettings()).status == "off"
