import json
import subprocess
import sys

import pytest

from neap_engine.cli import shipped_router as module
from shared.errors import Unavailable
from shared.ladder.folder import read_router_folder
from shared.registry.factory import open_registry
from tests.manifests import real_manifest

FINGERPRINT = real_manifest()["model"]["fingerprint"]


def test_the_checkout_has_it_for_its_model_alone():
    folder = module.shipped_router(FINGERPRINT)
    assert folder is not None
    assert read_router_folder(folder)[0]["model"]["fingerprint"] == FINGERPRINT
    assert module.shipped_router("sha256:" + "0" * 64) is None


def test_an_installation_without_one_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "PLACES", (tmp_path,))
    assert module.shipped_router(FINGERPRINT) is None


def test_an_installed_one_comes_first(monkeypatch, tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"model": {"fingerprint": "f"}}))
    monkeypatch.setattr(module, "PLACES", (tmp_path, *module.PLACES))
    assert module.shipped_router("f") == tmp_path


@pytest.fixture
def _in_this_process(neap, monkeypatch):
    """The command runs in the test's process: another one would import torch for seconds."""

    def run(command, **_):
        assert command[:3] == [sys.executable, "-m", "neap_engine.cli.main"]
        result = neap(*command[3:])
        return subprocess.CompletedProcess(command, result.exit_code, result.stdout, result.stderr)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("_in_this_process")
def test_an_import_that_fails_says_why(tmp_path):
    with pytest.raises(Unavailable, match="holds no router"):
        module.import_shipped(tmp_path, "tiny", "shipped", tmp_path)


@pytest.mark.usefixtures("_in_this_process")
def test_the_import_goes_to_the_demos_registry(tmp_path):
    module.import_shipped(module.shipped_router(FINGERPRINT), "tiny", "shipped", tmp_path / "data")
    assert open_registry(str(tmp_path / "data" / "registry")).aliases("tiny") == {"shipped": 1}
