"""`neap calibrate --start-service`: the whole life of a calibration in one command, as a Kubernetes Job runs it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.registry.factory import open_registry
from tests.worker import save_model

pytestmark = [pytest.mark.e2e, pytest.mark.full]


def _start(tmp_path: Path, *flags: str, **variables: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "neap_engine.cli.main", "calibrate", "--model", "tiny"]
    settings = {
        "NEAP_MODELS": f"tiny={tmp_path / 'model'}",
        "NEAP_DATA_DIR": str(tmp_path / "data"),
        "NEAP_REGISTRY": str(tmp_path / "registry"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [*command, "--start-service", *flags],
        env={**os.environ, **settings, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _processes_of(folder: Path) -> list[int]:
    """Processes whose environment names `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_router_is_published_and_nothing_is_left_running(tmp_path):
    save_model(tmp_path / "model")
    with _start(tmp_path, "--max-tokens", "3000", "--time-budget", "30") as command:
        output, _ = command.communicate(timeout=250)
    assert command.returncode == 0, output
    assert "published version 1" in output
    assert _processes_of(tmp_path) == []
    registry = open_registry(str(tmp_path / "registry"))
    assert registry.resolve("tiny", "latest").version == 1
    registry.close()


def test_sigterm_cancels_the_job_and_ends_the_service(tmp_path):
    save_model(tmp_path / "model")
    with _start(tmp_path, "--time-budget", "600") as command:
        assert command.stdout is not None
        lines = iter(command.stdout.readline, "")
        assert any("loading" in line for line in lines)
        command.send_signal(signal.SIGTERM)
        output, _ = command.communicate(timeout=60)
    assert command.returncode == 1
    assert "nothing was published" in output
    assert _processes_of(tmp_path) == []


def test_a_service_that_cannot_start_is_the_commands_error(tmp_path):
    with _start(tmp_path, NEAP_NO_SUCH_SETTING="1") as command:
        output, _ = command.communicate(timeout=60)
    assert command.returncode == 1
    assert "NEAP_NO_SUCH_SETTING" in output
    assert _processes_of(tmp_path) == []
