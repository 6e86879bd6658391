"""A soak of answers that are interrupted all the time: neither the client nor the worker keeps anything of them.

SOAK_ANSWERS: how many count, after half as many that do not. 200 by default.
"""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest
from neap_client import NeapClient
from neap_client.errors import Unavailable
from neap_client.inference.v1 import inference_pb2 as pb

from inference_service.servicer import SERVICE_NAME
from tests.generation import FULL, request_of
from tests.relay import relay
from tests.waiting import wait_until
from tests.worker_process import worker_process

NUM_ANSWERS = int(os.environ.get("SOAK_ANSWERS", "200"))
pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(900 + 5 * NUM_ANSWERS)]
NUM_CLIENTS, NUM_PROMPTS, NUM_NEW = 8, 4, 60
# A connection is lost when so many bytes have come over it: some tokens of each answer.
NUM_BYTES = 6000
# Allocators keep some; the tokens of every call that was lost would be more.
MAX_GROWTH_BYTES = 16 << 20
SAMPLED = pb.Sampling(temperature=0.9, seed=4)


class Losing:
    """Ends each connection of a relay. `num_lost` of them so far."""

    def __init__(self):
        self._lock, self._left, self.num_lost = threading.Lock(), NUM_BYTES, 0

    def __call__(self, data):
        with self._lock:
            self._left -= len(data)
            if self._left > 0:
                return data, True
            self._left, self.num_lost = NUM_BYTES, self.num_lost + 1
            return data[: len(data) // 2], False


def _held(process):
    return process.memory_info().rss, process.num_threads(), process.num_fds()


def _answers(target, count, alone):
    """Asks for `count` answers, checks them, and returns how often they were resumed."""
    with NeapClient(target, num_attempts=1000) as client, ThreadPoolExecutor(NUM_CLIENTS) as threads:

        def ask(number):
            # Two workers in a row may be killed before a request has brought anything, as if it were the cause.
            while True:
                try:
                    return asked(number)
                except Unavailable as error:
                    if error.reason != "LOST_WITH_WORKERS":
                        raise

        def asked(number):
            prompt = random.Random(number).randrange(NUM_PROMPTS)
            answer = client.answer(_request(prompt))
            assert (list(answer.token_ids), answer.text) == alone[prompt]
            assert answer.usage.num_completion_tokens == NUM_NEW
            return len(answer.resumptions)

        return sum(threads.map(ask, range(count)))


def _request(prompt):
    sampling = SAMPLED if prompt % 2 else None
    return request_of(NUM_NEW, text=f"hello {prompt}", sampling=sampling, depth=FULL)


def test_answers_that_are_resumed_leave_nothing(folder, tmp_path):
    with ExitStack() as stack:
        worker = worker_process(folder, tmp_path / "registry", "--prefix-cache-mb", "8")
        process, address = stack.enter_context(worker)
        with NeapClient(address) as client:
            client.wait_ready(SERVICE_NAME, timeout_s=120)
            whole = [client.answer(_request(prompt)) for prompt in range(NUM_PROMPTS)]
        alone = [(list(answer.token_ids), answer.text) for answer in whole]
        losing = Losing()
        port = stack.enter_context(relay(int(address.rpartition(":")[2]), answer=losing))
        both = [psutil.Process(), psutil.Process(process.pid)]
        _answers(f"127.0.0.1:{port}", NUM_ANSWERS // 2, alone)
        before = list(map(_held, both))
        num_lost = losing.num_lost
        num_resumed = _answers(f"127.0.0.1:{port}", NUM_ANSWERS, alone)
        print(f"{num_resumed} resumptions, {losing.num_lost - num_lost} connections lost; before {before}")
        assert num_resumed > NUM_ANSWERS

        def are_as_before():
            """Connections that were lost, and their threads, end a little later."""
            return all(
                now <= then + 2
                for one, own in zip(both, before, strict=True)
                for now, then in zip(_held(one)[1:], own[1:], strict=True)
            )

        wait_until(are_as_before)
        after = list(map(_held, both))
        print(f"after {after}")
        for now, then in zip(after, before, strict=True):
            assert now[0] - then[0] < MAX_GROWTH_BYTES
