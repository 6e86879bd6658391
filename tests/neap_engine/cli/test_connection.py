"""Commands wait for a service of this machine that is starting."""

import os
import signal
import socket
import threading
import time
from concurrent import futures
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from neap_client.inference.v1 import inference_pb2_grpc

from neap_engine.cli import connection
from tests.neap_engine.cli.conftest import FakeInference

STATUS = health_pb2.HealthCheckResponse


class StartingWorker:
    """Starts to listen at the first pause of whoever waits for it, and serves once that has seen it load."""

    def __init__(self, output) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{taken.getsockname()[1]}"
        self._output = output
        self.dies, self.num_pauses_after = False, 0
        self.pauses: list[float] = []
        self.inference = FakeInference()
        self.inference.loading = "loading (reading tiny, 1 of 2)"
        self._health = health.HealthServicer()
        self._health.set("", STATUS.NOT_SERVING)
        self._server: grpc.Server | None = None

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if self._server is None:
            self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
            inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.inference, self._server)
            self._server.add_insecure_port(self.address)
            self._server.start()
        elif "(reading tiny, 1 of 2)" in self._output():
            if self.dies:
                self.stop()
                self.num_pauses_after += 1
                assert self.num_pauses_after < 10, "waits for a service that has ended"
            self.inference.loading = ""
            self._health.set("", STATUS.SERVING)
        time.sleep(0.01)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()


@pytest.fixture
def starting(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(connection, "say", said.append)
    worker = StartingWorker(lambda: "\n".join(said))
    # Not time's own function: threads that other tests have left sleep, too.
    monkeypatch.setattr(connection, "time", SimpleNamespace(sleep=worker.pause, monotonic=time.monotonic))
    yield worker, said
    worker.stop()


@pytest.mark.parametrize("flags", [[], ["--wait", "50"]])
def test_a_command_waits_for_a_service_that_starts_and_loads(starting, neap, flags):
    worker, said = starting
    result = neap("generate", "hi", "--worker", worker.address, *flags)
    assert result.stdout == "Héllo there\n"
    assert [line.partition(": ")[2] for line in said] == [
        "nobody answers yet (--wait 0 does not wait)",
        "loading (reading tiny, 1 of 2) (--wait 0 does not wait)",
    ]
    first, second, third = worker.pauses[:3]
    assert first < second < third, "each look is a line in the log of the service"


def test_a_command_does_not_wait_for_a_service_that_has_ended(starting, neap):
    worker, said = starting
    worker.dies = True
    result = neap("generate", "hi", "--worker", worker.address, code=1)
    assert "GRPC_UNAVAILABLE" in result.output
    assert len(said) == 2


def test_commands_do_not_wait_for_other_machines(monkeypatch):
    monkeypatch.setattr(connection, "is_loopback_target", lambda target: False)
    monkeypatch.setattr(connection.NeapClient, "is_serving", lambda *_, **__: pytest.fail("asked"))
    token = connection._wait_s.set(None)
    connection.connect("127.0.0.1:1").close()
    connection._wait_s.reset(token)


def test_every_command_that_calls_a_service_can_wait(neap):
    for command in (
        ["generate"],
        ["calibrate"],
        ["jobs", "watch"],
        ["routers", "list"],
        ["routers", "promote"],
    ):
        assert "--wait" in neap(*command, "--help").output


def test_ctrl_c_never_interrupts_grpc_when_a_call_begins(monkeypatch):
    """Closing the client would wait for that call for ever."""
    threads = []

    def begins(*_, **__):
        threads.append(threading.current_thread())
        os.kill(os.getpid(), signal.SIGINT)

    for name in ("_call", "generate", "answer"):
        monkeypatch.setattr(connection.NeapClient, name, begins)
    for call in ("list_models", "generate", "answer"):
        client = connection.InterruptibleClient("127.0.0.1:1")
        with pytest.raises(KeyboardInterrupt):
            getattr(client, call)(*[None] * (call != "list_models"))
    assert len(threads) == 3
    assert threading.main_thread() not in threads
