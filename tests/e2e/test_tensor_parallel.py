"""A worker of two ranks, as its clients and its supervisor see it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb

from inference_service.servicer import SERVICE_NAME
from tests.families import build_family
from tests.generation import EXACT, FULL, request_of
from tests.worker import build_tokenizer
from tests.worker_process import LISTENING, ROOT, start_worker, worker_process

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
SAMPLED = pb.Sampling(temperature=1.1, top_p=0.95, seed=5)
# Calls are refused at once when a worker ends.
FLAGS = ("--tensor-parallel", "2", "--grace-s", "0", "--threads", "1")


@contextmanager
def _ranks(folder, tmp_path, name):
    """(process of rank 0, its address, process of rank 1, the log's lines so far)"""
    with (
        (tmp_path / name).open("wb") as log,
        worker_process(folder, tmp_path / "registry", *FLAGS, stderr=log) as (process, address),
    ):
        with NeapClient(address) as client:
            client.wait_ready(SERVICE_NAME, timeout_s=240)
        (other,) = psutil.Process(process.pid).children()

        def lines():  # libraries of C++ say goodbye in their own words
            return [json.loads(x) for x in (tmp_path / name).read_text().splitlines() if x.startswith("{")]

        yield process, address, other, lines


@pytest.mark.full
def test_exact_is_full_and_both_ranks_end_together(folder, tmp_path):
    with _ranks(folder, tmp_path, "log") as (process, address, other, lines):
        with NeapClient(address) as client:
            streams = [client.generate(request_of(40, depth=depth, sampling=SAMPLED)) for depth in (FULL, EXACT)]
            started = [next(iter(stream)).started for stream in streams]
            for stream in streams:
                list(stream)
            assert list(streams[0].token_ids) == list(streams[1].token_ids)
            assert len(streams[0].token_ids) == 40
            assert {one.exact_promise for one in started} == {pb.EXACT_PROMISE_TOKENS_OF_FULL}
        process.terminate()
        assert process.wait(60) == 0
        assert other.wait(60) in (0, None)
        assert [line["rank"] for line in lines() if line["event"] == "a rank ends as it was told"] == [1]


@pytest.mark.full
def test_a_stream_goes_on_elsewhere_when_its_worker_loses_a_rank(folder, tmp_path):
    request = request_of(400, depth=EXACT, sampling=SAMPLED)
    with (
        _ranks(folder, tmp_path, "one") as (process, address, other, lines),
        _ranks(folder, tmp_path, "two") as (_, elsewhere, _, _),
    ):
        with NeapClient(elsewhere) as client:
            whole = client.generate(request)
            list(whole)
        with NeapClient(f"ipv4:{address},{elsewhere}", has_affinity=False) as client:
            # Calls are shared in turn, so two of the last four wait for a rank that stands still.
            streams = [client.generate(request) for _ in range(2)]
            for stream in streams:
                next(stream)
                next(stream)
            os.kill(other.pid, signal.SIGSTOP)
            streams += [client.generate(request) for _ in range(4)]
            began_s = time.monotonic()
            os.kill(other.pid, signal.SIGKILL)
            assert process.wait(60) == 1
            ended_s = time.monotonic() - began_s
            for stream in streams:
                list(stream)
                assert list(stream.token_ids) == list(whole.token_ids)
            assert max(stream.num_attempts for stream in streams) >= 2, f"ended after {ended_s} s"
        (lost,) = [line for line in lines() if line["event"] == "a rank has ended, so the worker ends"]
        assert (lost["rank"], lost["exit_status"]) == (1, -signal.SIGKILL)


@pytest.mark.full
def test_ranks_end_when_the_first_is_killed(folder, tmp_path):
    with _ranks(folder, tmp_path, "log") as (process, _, other, _):
        process.kill()
        other.wait(60)
        assert not other.is_running()


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "flags", "reason"),
    [
        ("gpt2", ("--tensor-parallel", "2"), "TENSOR_PARALLEL_NOT_SUPPORTED"),
        ("llama", ("--tensor-parallel", "2", "--model", "other=."), "BAD_CONFIGURATION"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_at_start(family, flags, reason, tmp_path):
    build_family(family).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    process = start_worker(
        "--model", f"tiny={tmp_path / 'model'}", "--registry", str(tmp_path / "r"), *flags, stderr=subprocess.PIPE
    )
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert f'"reason": "{reason}"' in errors


@pytest.mark.full
def test_torchrun_starts_all_ranks(folder, tmp_path):
    """Its environment gives each its place, as on several machines."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0")
    worker = ("inference_service", "--listen", "127.0.0.1:0", "--model", f"tiny={folder}", *FLAGS)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "NEAP_DATA_DIR": str(tmp_path)}
    command = [sys.executable, "-m", *launcher, "-m", *worker]
    with (tmp_path / "log").open("wb") as log:
        agent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert agent.stdout is not None
    try:
        address = agent.stdout.readline().removeprefix(LISTENING).strip()
        with NeapClient(address) as client:
            client.wait_ready(SERVICE_NAME, timeout_s=240)
            stream = client.generate(request_of(9, depth=EXACT))
            list(stream)
            assert len(stream.token_ids) == 9
        ranks = psutil.Process(agent.pid).children()
        assert len(ranks) == 2
        agent.terminate()
        agent.wait(60)
        assert not psutil.wait_procs(ranks, 30)[1]
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
    assert "a rank ends as it was told" in (tmp_path / "log").read_text()
