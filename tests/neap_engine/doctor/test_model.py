"""How a model runs is described: on a CPU by what runs on our kernels, on a GPU by its runner."""

import pytest

from neap_engine.doctor import checks
from neap_engine.doctor.checks import described_acceleration, described_runner
from shared.model.loaded import wrap_model
from shared.model.runners import make_runner
from shared.service_settings import ModelSource, WorkerSettings
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


@pytest.mark.parametrize(("free_mb", "status"), [(551, "ok"), (550, "broken")])
def test_what_a_worker_will_take_is_compared_with_what_is_free(monkeypatch, tmp_path, free_mb, status):
    file = write_llama(tmp_path / "tiny.gguf")
    monkeypatch.setattr(checks, "available_bytes", lambda _: free_mb * 1_000_000)
    found = checks.memory(ModelSource("tiny", str(file)), WorkerSettings())
    assert (found.name, found.status, bool(found.advice)) == ("memory of tiny", status, status == "broken")
    assert found.facts == {"needed_mb": 500, "first_start_mb": 550, "free_mb": free_mb}


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"device": "cuda"}])
def test_what_is_not_known_beforehand_is_not_guessed(tmp_path, changes):
    file = write_llama(tmp_path / "tiny.gguf")
    assert checks.memory(ModelSource("tiny", str(file)), WorkerSettings(**changes)).status == "off"
    assert checks.memory(ModelSource("tiny", str(tmp_path)), WorkerSettings()).status == "off"
