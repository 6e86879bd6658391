"""`neap models fetch` from a hub, and from a bucket. test_bucket_download.py has the faults of a bucket."""

import os
import signal
from pathlib import Path

import obstore
import pytest
from huggingface_hub import constants
from obstore.store import S3Store
from typer.testing import CliRunner

from neap_engine.cli.main import app
from tests.hub import hub
from tests.servers import S3Server

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 100_000, "tokenizer.json": b"{}"}


def _fetch(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", "fetch", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    return s3.store("models")


@pytest.mark.full
def test_a_bucket_gives_all_files_but_pickles_and_code(bucket, tmp_path):
    for name, content in {**FILES, "pytorch_model.bin": b"x", "code.py": b"x"}.items():
        obstore.put(bucket, f"tiny/{name}", content)
    obstore.put(bucket, "other/config.json", b"another model")
    folder = tmp_path / "models" / "tiny"
    assert _fetch("s3://models/tiny", str(folder))[0] == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert "nothing is fetched" in _fetch("s3://models/tiny", str(folder))[1]
    code, said = _fetch("s3://models/none", str(tmp_path / "none"))
    assert code == 1
    assert "no .safetensors" in said
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_a_model_that_the_hub_does_not_have_is_named(monkeypatch, tmp_path):
    with hub({}) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        code, said = _fetch("nobody/nothing", str(tmp_path / "models" / "x"))
    assert code == 1
    assert "the Hub has no model nobody/nothing" in " ".join(said.split())
    assert list((tmp_path / "models").iterdir()) == []


def test_a_fetch_that_is_told_to_end_leaves_what_the_next_one_goes_on_with(tmp_path, monkeypatch):
    def terminated(source: str, work: Path) -> None:
        (work / "config.json").write_text("{}")
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would end this process"
        os.kill(os.getpid(), signal.SIGTERM)

    def continued(source: str, work: Path) -> None:
        assert (work / "config.json").exists()
        (work / "model.safetensors").write_text("")

    folder = tmp_path / "models" / "tiny"
    monkeypatch.setattr("neap_engine.cli.models.fetch_from_hub", terminated)
    assert _fetch("nobody/tiny", str(folder))[0] == 143
    assert not folder.exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.setattr("neap_engine.cli.models.fetch_from_hub", continued)
    assert _fetch("nobody/tiny", str(folder))[0] == 0
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny"]
