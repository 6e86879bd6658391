import os
import sys
from pathlib import Path

import pytest

from neap_engine.cli.processes import ServiceProcess
from shared.errors import Unavailable
from tests.waiting import wait_until

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
