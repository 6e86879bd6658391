import subprocess
import sys

import pytest

from demo import shipped_router as module
from shared.errors import Unavailable
from shared.registry.factory import open_registry
from tests.manifests import real_manifest

FINGERPRINT = real_manifest()["model"]["fingerprint"]


def test_it_is_for_its_model_alone():
    assert module.is_of_model(FINGERPRINT)
    assert not module.is_of_model("sha256:" + "0" * 64)


@pytest.fixture
def _in_this_process(neap, monkeypatch):
    """The command runs in the test's process: another one would import torch for seconds."""

    def run(command, **_):
        assert command[:3] == [sys.executable, "-m", "neap_engine.cli.main"]
        result = neap(*command[3:], code=None)
        return subprocess.CompletedProcess(command, result.exit_code, result.stdout, result.stderr)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("_in_this_process")
def test_an_import_that_fails_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    with pytest.raises(Unavailable, match="holds no router"):
        module.import_shipped("tiny", "shipped", tmp_path)


@pytest.mark.usefixtures("_in_this_process")
def test_the_import_goes_to_the_demos_registry(tmp_path):
    module.import_shipped("tiny", "shipped", tmp_path / "data")
    assert open_registry(str(tmp_path / "data" / "registry")).aliases("tiny") == {"shipped": 1}
