"""The numerics of real workers, as their clients see them: kernels of two kinds, and two numbers of threads."""

import platform
from contextlib import ExitStack

import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb

from inference_service.servicer import SERVICE_NAME
from tests.generation import request_of
from tests.worker_process import worker_process

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.full,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the sets of kernels give the same bits"),
]


def _portable(threads: int) -> tuple[str, ...]:
    return "--cpu-path", "portable", "--threads", str(threads)


def test_workers_share_an_id_if_they_share_kernels(folder, tmp_path):
    flags = (_portable(1), _portable(2), ("--require-exact",))
    started, models = [], []
    with ExitStack() as stack:
        workers = [
            stack.enter_context(worker_process(folder, tmp_path / str(number), *own, is_forked=True))
            for number, own in enumerate(flags)
        ]
        for _, address in workers:
            client = stack.enter_context(NeapClient(address))
            client.wait_ready(SERVICE_NAME, timeout_s=120)
            events = list(client.generate(request_of(3)))
            started.append(events[0].started)
            models.append(client.get_model("tiny"))
    ids = [one.numerics_id for one in started]
    assert ids[0] == ids[1] != ids[2]
    assert [model.numerics_id for model in models] == ids
    for said in (*started, *models):
        assert said.exact_promise == pb.EXACT_PROMISE_TOKENS_OF_FULL
