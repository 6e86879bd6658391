""""""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neap_engine.cli.processes import ServiceProcess
from shared.errors import Unavailable
from shared.registry.factory import open_registry
from tests.waiting import wait_until
from tests.worker import save_model

SERVICE = """
import subprocess, sys, time
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2_grpc
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
server = grpc.server(futures.ThreadPoolExecutor())
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(f"listening on 127.0.0.1:{port}", flush=True)
open(sys.argv[-1], "w").write(str(child.pid))
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a script that the child process can run as `python -m fake_service`."""

    def write(text: str) -> str:
        (tmp_path / "fake_service.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
        return "fake_service"

    return write


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_service_is_started_and_stopped_without_leftovers(module, tmp_path):
    pid_file = tmp_path / "pid"
    log = tmp_path / "logs" / "x.log"
    pids = []

    def interrupted() -> None:
        with ServiceProcess("fake", module(SERVICE), [str(pid_file)], log) as process:
            assert process.wait_serving(30.0).startswith("127.0.0.1:")
            pids.append(process.pid)
            wait_until(lambda: pid_file.exists() and pid_file.read_text())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not is_alive(pids[0])
    assert not is_alive(int(pid_file.read_text()))


def test_a_service_that_dies_shows_its_log(module, tmp_path):
    name = module("import sys; sys.exit('no such model')")
    process = ServiceProcess("fake", name, [], tmp_path / "x.log")
    with process, pytest.raises(Unavailable) as caught:
        process.wait_serving(30.0)
    assert "no such model" in caught.value.message
    assert caught.value.reason == "SERVICE_ENDED"


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
