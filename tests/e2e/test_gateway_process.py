"""The gateway as a process: shutdown, the death of a worker, curl, and what it imports."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.gateways import chat_body, chunk, finished, gateway_to, scripted_worker, started
from tests.waiting import wait_until
from tests.worker import save_model
from tests.worker_process import LISTENING, ROOT, worker_process

pytestmark = pytest.mark.e2e
CHAT = "/v1/chat/completions"


@contextmanager
def gateway_process(target, *flags):
    """(process, URL) of `neap serve gateway`."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "neap_engine.cli.main", "serve", "gateway"]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--workers", target, *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith(LISTENING), line
        yield process, f"http://{line.removeprefix(LISTENING).strip()}"
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


class Held:
    """A script whose stream goes on after its first token when `go_on` is set."""

    def __init__(self):
        self.go_on = threading.Event()

    def __call__(self, request):
        return [started(), chunk("a"), self._wait(), chunk("b"), finished()]

    async def _wait(self):
        while not self.go_on.is_set():
            await asyncio.sleep(0.01)


def refuses_connections(url):
    try:
        httpx.get(f"{url}/healthz", timeout=5)
    except httpx.ConnectError:
        return True
    except (httpx.ReadError, httpx.RemoteProtocolError, httpx.ReadTimeout):
        # The kernel had taken this connection when the listener closed; the next one is refused.
        return False
    return False


def texts(lines):
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(part["choices"][0]["delta"].get("content", "") for part in parts if "choices" in part)


def test_sigterm_lets_running_requests_finish():
    script = Held()
    with (
        scripted_worker(script) as worker,
        gateway_process(worker.target, "--grace-s", "0.2") as (process, url),
        ThreadPoolExecutor() as pool,
    ):
        streamed, whole = (
            pool.submit(httpx.post, f"{url}{CHAT}", json=chat_body(stream=is_stream), timeout=60)
            for is_stream in (True, False)
        )
        wait_until(lambda: len(worker.worker.requests) == 2)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses_connections(url))
        assert process.poll() is None
        script.go_on.set()
        lines = streamed.result(60).text.split("\n\n")
        assert process.wait(60) == 0
    assert (texts(lines), lines[-2]) == ("ab", "data: [DONE]")
    assert whole.result().json()["choices"][0]["message"]["content"] == "ab"


@pytest.mark.full
def test_what_does_not_finish_in_time_ends_with_an_error():
    with (
        scripted_worker(Held()) as worker,
        gateway_process(worker.target, "--grace-s", "0", "--drain-timeout-s", "0.3") as (process, url),  # fmt: skip
        httpx.stream("POST", f"{url}{CHAT}", json=chat_body(stream=True), timeout=60) as reply,
    ):
        lines = reply.iter_lines()
        first = [next(lines), next(lines), next(lines)]
        assert texts(first) == "a"
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert process.wait(60) == 0
        assert worker.worker.cancelled.wait(60)


@pytest.mark.full
def test_a_worker_that_dies_ends_the_stream_with_an_error(tmp_path):
    model, registry = save_model(tmp_path / "model"), tmp_path / "registry"
    with worker_process(model, registry) as (worker, target), gateway_process(target) as (_, url):
        wait_until(lambda: httpx.get(f"{url}/readyz", timeout=60).status_code == 200)
        body = chat_body(stream=True, max_tokens=1900, ignore_eos=True, neap={"policy": "full"})
        with httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=60) as reply:
            assert reply.status_code == 200
            lines = reply.iter_lines()
            for _ in range(6):
                next(lines)
            worker.send_signal(signal.SIGKILL)
            last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert error["neap"]["grpc_code"] == "UNAVAILABLE"
        assert "was lost" in error["message"]
        wait_until(lambda: httpx.get(f"{url}/readyz", timeout=60).status_code == 503)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_streams_events():
    script = Held()
    script.go_on.set()
    with scripted_worker(script) as worker, gateway_to(worker.target) as gateway:
        command = ["curl", "-sSN", "--noproxy", "*", f"{gateway.url}{CHAT}", "-d", json.dumps(chat_body(stream=True))]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    lines = shown.stdout.split("\n\n")
    assert (texts(lines), lines[-2]) == ("ab", "data: [DONE]")


def test_a_wrong_setting_ends_the_start_with_a_reason():
    command = [sys.executable, "-m", "neap_engine.gateway", "--workers", "dns:///worker.example:7071"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "TOKENS_OVER_PLAIN_TEXT" in ended.stderr


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("neap_engine.gateway.__main__", {"torch", "transformers", "typer"}),
        ("neap_engine.cli.main", {"starlette", "uvicorn", "openai"}),
    ],
)
def test_nothing_heavy_is_imported(module, unwanted):
    program = f"import sys, {module}; print({unwanted!r} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "set()"
