"""Streams under chaos: workers are killed, stopped in mid-air, drained and started anew, and no client sees it.

CHAOS_SECONDS: how long, 30 by default. CHAOS_STREAMS: how many at once, 12 by default, a quarter of them over HTTP.
"""

import json
import os
import random
import signal
import threading
import time
from contextlib import ExitStack

import httpx
import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb

from inference_service.servicer import SERVICE_NAME
from shared.errors import NeapError
from shared.registry.factory import open_registry
from tests.e2e.test_gateway_process import gateway_process
from tests.generation import EXACT, FULL, publish, request_of
from tests.worker_process import worker_process

pytestmark = [pytest.mark.e2e, pytest.mark.full]
CHAOS_S = float(os.environ.get("CHAOS_SECONDS", "30"))
NUM_WORKERS, NUM_STREAMS = 3, int(os.environ.get("CHAOS_STREAMS", "12"))
NUM_HTTP_STREAMS = NUM_STREAMS // 4
NUM_NEW = 700
# What clients wait for a worker that is stopped, and for how long it is.
STALL_S, STOPPED_S = 4.0, 12.0
READY_S = 120.0
FLAGS = ("--grace-s", "0.5", "--drain-timeout-s", "3600", "--max-queue", str(2 * NUM_STREAMS))
KILL, DRAIN, STOP, LOSE = "killed", "drained", "stopped for a while", "stopped and killed"
SAMPLED = pb.Sampling(temperature=1.1, top_p=0.95, seed=5)
PENALISED = pb.Sampling(
    temperature=0.8, top_k=50, min_p=0.01, repetition_penalty=1.2, seed=9, frequency_penalty=0.3
)


def requests():
    """Greedy, sampled, penalised, with log-probabilities, with a stop string; by both policies.
    Most of their text is of several bytes."""
    made = [
        request_of(NUM_NEW, depth=depth, sampling=sampling, logprobs=logprobs)
        for depth in (EXACT, FULL)
        for sampling, logprobs in ((None, None), (SAMPLED, None), (PENALISED, None), (SAMPLED, 2))
    ]
    made.append(request_of(NUM_NEW, depth=EXACT, sampling=SAMPLED))
    return made


class Worker:
    """One of the workers, which always listens at the same address."""

    def __init__(self, folder, registry):
        self._place = folder, registry
        self._stack, self.address = ExitStack(), "127.0.0.1:0"
        self.is_ready = threading.Event()
        self.start()

    def start(self):
        process = worker_process(*self._place, *FLAGS, listen=self.address)
        self._process, self.address = self._stack.enter_context(process)
        with NeapClient(self.address) as client:
            client.wait_ready(SERVICE_NAME, timeout_s=READY_S)
        self.is_ready.set()

    def suffer(self, what):
        """Until it serves again. A worker that drains must end although its answers are long."""
        if what in (STOP, LOSE):
            self._process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)
        if what == STOP:
            self._process.send_signal(signal.SIGCONT)
            self.is_ready.set()
            return
        self._process.send_signal(signal.SIGTERM if what == DRAIN else signal.SIGKILL)
        status = self._process.wait(60)
        assert status == (0 if what == DRAIN else -signal.SIGKILL)
        self._stack.close()
        self.start()

    def close(self):
        self._stack.close()


class Clients:
    """Threads that ask for answers until `stop`, and compare each with that of a run alone.
    `failures`: what went wrong."""

    def __init__(self, workers, url, expected):
        targets = ",".join(worker.address for worker in workers)
        self._target, self._url = f"ipv4:{targets}", url
        self._expected = expected
        self._over = threading.Event()
        self.failures, self.num_answers, self.num_resumed = [], 0, 0
        self._lock = threading.Lock()
        http = [self._ask_http] * NUM_HTTP_STREAMS
        runs = http + [self._ask] * (NUM_STREAMS - len(http))
        self._threads = [threading.Thread(target=self._run, args=(run,)) for run in runs]
        for thread in self._threads:
            thread.start()

    def stop(self):
        self._over.set()
        for thread in self._threads:
            thread.join(600)
            assert not thread.is_alive()

    def _run(self, ask):
        draw = random.Random(threading.get_ident())
        try:
            with (
                NeapClient(
                    self._target,
                    num_attempts=60,
                    health_service=SERVICE_NAME,
                    stall_timeout_s=STALL_S,
                ) as client,
                httpx.Client(timeout=600) as http,
            ):
                while not self._over.is_set():
                    request, whole = draw.choice(self._expected)
                    ask(request, whole, client, http)
                    with self._lock:
                        self.num_answers += 1
        except (AssertionError, NeapError, httpx.HTTPError) as error:
            self.failures.append(error)

    def _ask(self, request, whole, client, _):
        events = list(stream := client.generate(request))
        answer = stream.answer()
        chunks = [event.chunk for event in events if event.HasField("chunk")]
        assert [chunk.text for chunk in chunks] == [chunk.text for chunk in whole.chunks]
        for chunk, expected in zip(chunks, whole.chunks, strict=True):
            assert [t.id for t in chunk.tokens] == [t.id for t in expected.tokens]
            assert [t.logprob for t in chunk.tokens] == [t.logprob for t in expected.tokens]
        for name in ("reason", "stop_match", "text"):
            assert getattr(answer.finished, name) == getattr(whole.finished, name)
        assert answer.usage.num_completion_tokens == whole.usage.num_completion_tokens
        assert not any(one.continued_inexactly for one in answer.resumptions)
        with self._lock:
            self.num_resumed += len(answer.resumptions)

    def _ask_http(self, request, whole, _, http):
        """As OpenAI's clients ask: one stream that ends with [DONE]."""
        body = {"model": "tiny", "prompt": request.text, "stream": True, "temperature": 0}
        body |= {field.name: value for field, value in request.sampling.ListFields()}
        body |= {"max_tokens": NUM_NEW, "stop": list(request.stopping.stop_strings)}
        body |= {"ignore_eos": True, "neap": {"policy": request.depth.WhichOneof("policy")}}
        if request.HasField("logprobs"):
            body["logprobs"] = request.logprobs
        text, ends = "", 0
        with http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    ends += 1
                elif line.startswith("data: "):
                    part = json.loads(line.removeprefix("data: "))
                    assert "error" not in part, part
                    text += part["choices"][0]["text"]
        assert (text, ends) == (whole.text, 1)


class Whole:
    """An answer that nobody interrupted."""

    def __init__(self, client, request):
        events = list(stream := client.generate(request))
        self.chunks = [event.chunk for event in events if event.HasField("chunk")]
        self.finished, self.usage, self.text = stream.finished, stream.finished.usage, stream.text


def test_no_stream_is_lost_and_each_is_that_of_a_run_alone(folder, tmp_path, engine):
    registry = open_registry(str(tmp_path / "registry"))
    publish(registry, engine)
    registry.close()
    with ExitStack() as stack:
        workers = [Worker(folder, tmp_path / "registry") for _ in range(NUM_WORKERS)]
        for worker in workers:
            stack.callback(worker.close)
        targets = ",".join(worker.address for worker in workers)
        flags = ("--num-attempts", "10", "--worker-stall-timeout-s", str(STALL_S))
        _, url = stack.enter_context(gateway_process(f"ipv4:{targets}", *flags))
        with NeapClient(workers[0].address) as client:
            asked = requests()
            wholes = [Whole(client, request) for request in asked[:-1]]
            asked[-1].stopping.stop_strings.append(wholes[1].text[500:505])
            asked[-1].stopping.ignore_eos = True
            wholes.append(Whole(client, asked[-1]))
        assert wholes[-1].finished.reason == pb.FINISH_REASON_STOP_STRING
        clients = Clients(workers, url, list(zip(asked, wholes, strict=True)))
        stack.callback(clients.stop)
        suffering, done = [], []
        draw, end_s = random.Random(1), time.monotonic() + CHAOS_S
        kinds = (KILL, DRAIN, STOP, LOSE)
        while time.monotonic() < end_s and not clients.failures:
            ready = [worker for worker in workers if worker.is_ready.is_set()]
            if len(ready) > 1:
                worker = draw.choice(ready)
                worker.is_ready.clear()
                # Each kind comes early.
                kind = kinds[len(done)] if len(done) < len(kinds) else draw.choice(kinds)
                done.append(kind)
                thread = threading.Thread(target=worker.suffer, args=(kind,))
                thread.start()
                suffering.append(thread)
            time.sleep(3.0)
        for thread in suffering:
            thread.join(READY_S + STOPPED_S)
        clients.stop()
        assert not clients.failures, clients.failures[0]
        assert set(done) == set(kinds)
        print(
            f"{len(done)} disasters, {clients.num_answers} answers, {clients.num_resumed} resumptions"
        )
        assert clients.num_resumed > 3
