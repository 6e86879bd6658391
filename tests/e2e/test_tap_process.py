"""A worker process that keeps answers to learn from, and ends in both ways."""

import signal
from pathlib import Path

import grpc
import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2_grpc

from inference_service.servicer import SERVICE_NAME
from shared.rpc.callers import Role
from shared.traffic.traffic import open_traffic
from tests.generation import answer, request_of
from tests.tokens import bearer, write_tokens
from tests.waiting import wait_until
from tests.worker import build_tokenizer, save_model
from tests.worker_process import worker_process

pytestmark = pytest.mark.e2e


@pytest.mark.full
@pytest.mark.parametrize("ends_by", [signal.SIGTERM, signal.SIGKILL])
def test_what_waits_is_written_at_the_end_or_lost_whole(tmp_path: Path, ends_by: signal.Signals) -> None:
    model, registry, key = save_model(tmp_path / "model"), tmp_path / "registry", tmp_path / "key"
    key.write_text("ab" * 32)
    tokens = write_tokens(tmp_path / "tokens", {"ann": (Role.GENERATE,)}, {"ann": "legal"})
    flags = [
        "--learn",
        "legal=1",
        "--traffic-key",
        str(key),
        "--auth-tokens",
        str(tmp_path / "tokens"),
        "--grace-s",
        "0",
    ]
    with (
        (tmp_path / "log").open("wb") as log,
        worker_process(model, registry, *flags, "--grace-s", "0", stderr=log) as (process, target),
        NeapClient(target) as client,
        grpc.insecure_channel(target) as channel,
    ):
        client.wait_ready(SERVICE_NAME, timeout_s=60)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = request_of(8, text="planted")
        made = answer(stub, request, metadata=bearer(tokens["ann"]))[1]
        process.send_signal(ends_by)
        wait_until(lambda: process.poll() is not None)
    read = open_traffic(str(registry), key).read("tiny", "legal")
    assert not read.skipped
    expected = [(build_tokenizer()("planted").input_ids, [token.id for token in made])]
    found = [(list(answer.prompt_ids), list(answer.answer_ids)) for answer in read.answers]
    assert found == (expected if ends_by == signal.SIGTERM else [])
    assert len(open_traffic(str(registry)).read("tiny", "legal").skipped) == len(found)  # it needs the key
    assert b"ab" * 32 not in (tmp_path / "log").read_bytes()
