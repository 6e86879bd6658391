import os
import signal
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from neap_engine.cli.main import app
from shared.termination import unwinding_on_sigterm


def terminate(*_: object) -> None:
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would end this process"
    os.kill(os.getpid(), signal.SIGTERM)


def test_what_is_temporary_is_removed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught, unwinding_on_sigterm(), tempfile.TemporaryDirectory(dir=tmp_path):
        terminate()
    assert caught.value.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_that_handles_the_signal_keeps_its_handler() -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with unwinding_on_sigterm():
            terminate()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_commands_unwind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neap_engine.cli.models.fetch_all", terminate)
    result = CliRunner().invoke(app, ["models", "fetch", "nobody/tiny", str(tmp_path / "tiny")])
    assert result.exit_code == 143
