"""A real worker's metrics, from its log line with the port to the end of the process."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from neap.inference.v1 import inference_pb2 as pb

from inference_service.servicer import SERVICE_NAME
from shared.rpc.client import NeapClient
from tests.worker import save_model

pytestmark = [pytest.mark.e2e, pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]
REQUEST = pb.GenerateRequest(
    model_id="tiny",
    text="hello",
    depth=pb.DepthPolicy(full=pb.Full()),
    stopping=pb.Stopping(max_tokens=9, ignore_eos=True),
)


@pytest.fixture
def process(tmp_path):
    flags = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--grace-s", "0.1"]
    flags += ["--model", f"tiny={save_model(tmp_path / 'model')}", "--data-dir", str(tmp_path)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    process = subprocess.Popen(
        [sys.executable, "-m", "inference_service", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait(60)
    process.stdout.close()
    process.stderr.close()


def test_metrics_are_served_where_the_log_says_and_do_not_hold_up_the_end(process):
    target = process.stdout.readline().split()[-1]
    port = None
    while port is None:
        line = json.loads(process.stderr.readline())
        port = line["port"] if line["event"] == "metrics listening" else None
    with NeapClient(target) as client:
        client.wait_ready(SERVICE_NAME)
        list(client.generate(REQUEST))
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as response:
        text = response.read().decode()
    assert 'neap_generation_tokens_total{model_id="tiny"} 9.0' in text
    assert "process_resident_memory_bytes" in text
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
