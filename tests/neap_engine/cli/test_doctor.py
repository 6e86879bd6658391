"""`neap doctor` with a tiny model and the registry of a folder."""

import json

import pytest

from shared.ops.build import ISA_FLAGS, WITHIN
from shared.registry.factory import open_registry
from tests.gguf_files import write_llama
from tests.worker import save_model


@pytest.fixture(autouse=True)
def settings_of_the_test_alone(monkeypatch):
    for name in ("NEAP_MODELS", "NEAP_REGISTRY", "NEAP_DEVICE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def doctor(neap, tmp_path):
    """Runs `neap doctor --json`. Returns its result, and the findings by name."""

    def run(*flags):
        result = neap("doctor", "--json", "--data-dir", str(tmp_path / "data"), *flags, code=None)
        document = json.loads(result.stdout)
        assert document["is_broken"] == (result.exit_code == 1)
        return result, {finding["name"]: finding for finding in document["findings"]}

    return run


def test_everything_works(doctor, tmp_path):
    save_model(tmp_path / "model")
    open_registry(str(tmp_path / "data" / "registry")).close()
    result, findings = doctor("--model", f"tiny={tmp_path / 'model'}")
    assert result.exit_code == 0, result.output
    assert findings["CPU kernels"]["status"] == "ok"
    assert findings["CPU kernels"]["facts"]["isa"] in {*ISA_FLAGS, *WITHIN}
    assert findings["registry"]["status"] == "ok"
    assert "tiny has no router yet" in findings["registry"]["detail"]
    assert findings["registry"]["facts"] == {"newest_versions": {"tiny": None}}
    model = findings["model tiny"]
    assert model["status"] == "ok"
    assert (model["facts"]["num_layers"], model["facts"]["layers"]) == (4, 4)
    assert "4 of 4 layers run as one kernel" in model["detail"]
    assert findings["versions"]["facts"]["transformers"]


@pytest.mark.usefixtures("wide")
def test_the_table_and_the_exit_status_tell_what_is_broken(neap, tmp_path, monkeypatch):
    """All faults are found, not the first one only."""
    monkeypatch.setenv("NEAP_REGISTRI", "x")
    (tmp_path / "file").touch()
    registry = ["--registry", str(tmp_path / "file" / "registry")]
    model = ["--model", f"tiny={tmp_path / 'nothing'}"]
    result = neap("doctor", *registry, *model, code=1)
    assert "broken: variables, registry, model tiny" in result.stderr
    rows = {row[2].strip(): row for row in map(cells, result.stdout.splitlines()) if len(row) > 3}
    assert "did you mean NEAP_REGISTRY?" in rows["variables"][3]
    assert "NotADirectoryError" in rows["registry"][3]
    assert "there is no such folder [MODEL_NOT_FOUND]" in rows["model tiny"][3]
    assert rows["CPU kernels"][1].strip() == "ok"


def cells(line):
    return line.split("│")


def test_a_registry_that_does_not_exist_is_not_created(doctor, tmp_path):
    (tmp_path / "data").mkdir()
    _, findings = doctor()
    assert findings["registry"]["status"] == "ok"
    assert "the first service that starts creates it" in findings["registry"]["detail"]
    assert list((tmp_path / "data").iterdir()) == []
    assert findings["models"]["status"] == "off"


def test_a_registry_that_can_only_be_read_is_broken(doctor, tmp_path):
    folder = tmp_path / "data" / "registry"
    open_registry(str(folder)).close()
    (folder / "parts").rmdir()
    (folder / "parts").touch()  # files are written in there; this stops root, too
    result, findings = doctor()
    assert result.exit_code == 1
    assert "[STORAGE_UNAVAILABLE]" in findings["registry"]["detail"]
    assert (folder / "parts").is_file()


def test_a_model_that_is_no_model_is_broken_for_a_reason(doctor, tmp_path):
    save_model(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "wonder"}')
    result, findings = doctor("--model", f"tiny={tmp_path / 'model'}")
    assert result.exit_code == 1
    assert "UNSUPPORTED_MODEL" in findings["model tiny"]["detail"]
    assert "wonder" in findings["model tiny"]["detail"], "the cause is told"


def test_a_file_needs_no_id_and_what_it_takes_is_said_without_loading_it(doctor, tmp_path):
    file = write_llama(tmp_path / "Tiny Model.gguf")
    _, findings = doctor("--model", str(file), "--skip-models")
    assert findings["memory of tiny-model"]["facts"]["needed_mb"] == 480
    assert findings["models"]["status"] == "off"


def test_models_that_are_skipped_are_not_loaded(doctor, tmp_path):
    result, findings = doctor("--model", f"tiny={tmp_path / 'nothing'}", "--skip-models")
    assert result.exit_code == 0
    assert findings["models"]["detail"] == "not loaded, as asked"


def test_settings_that_cannot_be_are_the_commands_error(neap):
    result = neap("doctor", "--model", "no-equals-sign", code=1)
    assert "it must be ID=SOURCE" in result.stderr
