"""`python -m inference_service` as a real process."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from neap.inference.v1 import inference_pb2 as pb

from inference_service.servicer import SERVICE_NAME
from shared.errors import Unavailable
from shared.rpc.client import NeapClient
from tests.worker import save_model

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]
REQUEST = pb.GenerateRequest(
    model_id="tiny",
    text="hello",
    depth=pb.DepthPolicy(full=pb.Full()),
    stopping=pb.Stopping(max_tokens=300, ignore_eos=True),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def _start(*flags):
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "inference_service", "--listen", "127.0.0.1:0", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@contextmanager
def _worker(folder, tmp_path, *flags):
    process = _start("--model", f"tiny={folder}", "--registry", str(tmp_path / "registry"), *flags)
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on 127.0.0.1:")
        with NeapClient(line.split()[-1], num_attempts=1) as client:
            yield process, client
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def test_ready_after_loading_then_sigterm_finishes_streams(folder, tmp_path):
    with _worker(folder, tmp_path, "--grace-s", "0.5") as (process, client):
        client.is_serving(SERVICE_NAME)  # the port answers from the beginning
        client.wait_ready(SERVICE_NAME, timeout_s=60)

        events = client.generate(REQUEST)
        next(events)
        process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + 5
        while client.is_serving(SERVICE_NAME):
            assert time.monotonic() < deadline_s
        assert client.get_model("tiny").model_id == "tiny"  # still taken
        *_, last = events
        assert last.finished.usage.num_completion_tokens == 300
        assert process.wait(10) == 0


def test_a_second_sigterm_ends_at_once(folder, tmp_path):
    with _worker(folder, tmp_path, "--grace-s", "60") as (process, client):
        client.wait_ready(SERVICE_NAME, timeout_s=60)
        events = client.generate(REQUEST)
        next(events)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        with pytest.raises(Unavailable):
            list(events)


def test_sigterm_while_loading_ends_at_once(folder, tmp_path):
    with _worker(folder, tmp_path) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "no model is named"),
        (["--model", "tiny=/no/such/folder"], "MODEL_NOT_FOUND"),
        (["--model", "tiny"], "ID=SOURCE"),
        (["--model", "tiny=x", "--grace-s", "nan"], "BAD_CONFIGURATION"),
        (["--model", "tiny=x", "--registry", "redis://nowhere"], "BAD_REGISTRY"),
    ],
)
def test_what_cannot_start_says_why_and_exits_with_2(flags, said, tmp_path, capfd, request):
    from inference_service.__main__ import main

    # asyncio's signal handlers want the main thread, which pytest has.
    assert threading.current_thread() is threading.main_thread()
    request.addfinalizer(structlog.reset_defaults)
    defaults = ["--listen", "127.0.0.1:0", "--data-dir", str(tmp_path)]
    assert main([*defaults, *flags]) == 2
    assert said in capfd.readouterr().err
