"""A soak: two workers beside all that clients do at once.
They read answers, cancel, miss deadlines, ask for nonsense, stop reading.

SOAK_SECONDS: how long, 24 by default. In the middle the first worker gets SIGTERM, and the second takes over. Then the
clients' counts agree with the workers' logs, every answer was that of a run alone, and memory has not grown.
"""

import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing

import grpc
import psutil
import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc
from neap_client.status import from_rpc_error

from inference_service.servicer import SERVICE_NAME
from shared.errors import DeadlineExceeded, Exhausted, InvalidInput, NotFound, Unavailable
from shared.registry.factory import open_registry
from tests.generation import EXACT, FULL, publish, request_of
from tests.worker_process import worker_process

SOAK_S = float(os.environ.get("SOAK_SECONDS", "24"))
pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(SOAK_S + 300)]
NUM_CLIENTS, NUM_PROMPTS, MAX_TOKENS = 32, 12, 24
PAUSE_S, HOLD_S, SAMPLE_S = 0.1, 3.0, 0.25
# What ended requests keep for later ones is full long before the first sample of memory that counts.
FLAGS = ("--max-queue", "8", "--grace-s", "1", "--stall-timeout-s", "1", "--prefix-cache-mb", "8")
FLAGS += ("--max-active-per-client", "1000")
MAX_GROWTH_BYTES = 48 << 20
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
BAD = (
    (InvalidInput, {"text": ""}),
    (InvalidInput, {"stopping": pb.Stopping(stop_strings=[""])}),
    (InvalidInput, {"sampling": pb.Sampling(temperature=-1.0)}),
    (NotFound, {"model_id": "nobody"}),
)


def _request(number, is_sampled, num_tokens=MAX_TOKENS, **changes):
    """One with one possible answer: greedy, or sampled with a seed of its own."""
    text = f"hello {number} " + "in the hell of it " * (number % 4)
    sampling = pb.Sampling(temperature=0.9, seed=number) if is_sampled else None
    return request_of(num_tokens, text=text, sampling=sampling, **changes)


class Clients:
    """`seen`: (kind of request, how it ended) -> how often. `wrong`: what must not be.
    Each method makes a request and checks it."""

    def __init__(self, client, slow, alone):
        self._client, self._slow, self._alone = client, slow, alone
        self._over, self._lock = threading.Event(), threading.Lock()
        self.seen, self.wrong, self.num_calls = Counter(), [], 0
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(NUM_CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self):
        self._over.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def num(self, *ends):
        return sum(count for (_, end), count in self.seen.items() if end in ends)

    def _run(self, seed):
        draw = random.Random(seed)
        kinds = (self._answer, self._cancel, self._deadline, self._bad, self._slow_reader)
        while not self._over.wait(draw.expovariate(1 / PAUSE_S)):
            (kind,) = draw.choices(kinds, (62, 12, 12, 10, 4))
            try:
                end, num_calls = kind(draw)
            except Exception as error:
                end, num_calls = "wrong", 1
                self.wrong.append(f"{kind.__name__}: {error!r}")
            with self._lock:
                self.seen[kind.__name__, end] += 1
                self.num_calls += num_calls

    def _drawn(self, draw):
        """A request and its tokens."""
        kind, num_tokens = draw.choice(list(self._alone)), draw.randint(1, MAX_TOKENS)
        request = _request(*kind, num_tokens, depth=draw.choice([FULL, EXACT]))
        return request, self._alone[kind][:num_tokens]

    def _answer(self, draw):
        """Whatever happens to the workers."""
        request, expected = self._drawn(draw)
        stream = self._client.generate(request)
        assert sum(event.HasField("finished") for event in stream) == 1
        assert stream.token_ids == expected
        return "finished", stream.num_attempts

    def _cancel(self, draw):
        request, expected = self._drawn(draw)
        num_tokens = draw.randrange(len(expected))
        with self._client.generate(request) as stream:
            for _ in stream:
                if len(stream.token_ids) >= num_tokens:
                    break
        assert stream.token_ids == expected[: len(stream.token_ids)]
        return "cancelled", stream.num_attempts

    def _deadline(self, draw):
        """It often passes. The client gives up earlier if the next attempt would come too late. If that would resume an
        answer of a worker that stops, it is the deadline that ends it."""
        request, expected = self._drawn(draw)
        stream = self._client.generate(request, timeout_s=10 ** draw.uniform(-2, 0.7))
        end = "finished"
        try:
            list(stream)
        except DeadlineExceeded:
            end = "too late"
        except (Exhausted, Unavailable):
            end = "refused"
            assert not stream.token_ids
        got = stream.token_ids
        assert got == (expected if end == "finished" else expected[: len(got)])
        return end, stream.num_attempts

    def _bad(self, draw):
        error, changes = draw.choice(BAD)
        stream = self._client.generate(request_of(**changes))
        try:
            list(stream)
        except error:
            return "rejected", stream.num_attempts
        raise AssertionError("it was answered")

    def _slow_reader(self, draw):
        """Must be ended, unless the worker is too busy to fill the window meanwhile: then it may finish."""
        request = _request(draw.randrange(NUM_PROMPTS), False, 800, logprobs=20)
        call = inference_pb2_grpc.InferenceServiceStub(self._slow).Generate(request)
        try:
            next(call)
            self._over.wait(HOLD_S)
            give_up_s = time.monotonic() + HOLD_S
            while time.monotonic() < give_up_s and next(call, None):
                pass
            return "caught up", 1
        except grpc.RpcError as error:
            reason = from_rpc_error(error).reason
            # A worker that ends waits a few seconds for its clients to read, then closes their connections.
            assert reason in ("SLOW_READER", "QUEUE_FULL", "GRPC_UNAVAILABLE", "GRPC_CANCELLED")
            return "ended" if reason == "SLOW_READER" else "refused", 1
        finally:
            call.cancel()


def _growth(process, seconds):
    """Bytes by which a worker grows, from after a third of the time, when all kinds of requests have come, to the last
    tenth."""
    samples, end_s = [], time.monotonic() + seconds
    while time.monotonic() < end_s:
        samples.append(psutil.Process(process.pid).memory_info().rss)
        time.sleep(SAMPLE_S)
    tenth = len(samples) // 10
    early = statistics.median(samples[len(samples) // 3 :][:tenth])
    return statistics.median(samples[-tenth:]) - early


def _logged(log):
    """Number of calls to Generate by status code."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    calls = [line for line in lines if line["event"] == "call ended"]
    return Counter(line["code"] for line in calls if line["method"].endswith("/Generate"))


def test_nothing_is_lost_wrong_or_kept(folder, engine, tmp_path):
    with closing(open_registry(str(tmp_path / "registry"))) as registry:
        publish(registry, engine)
    logs, processes, addresses = [tmp_path / "first", tmp_path / "second"], [], []
    with ExitStack() as stack:
        for log in logs:
            stderr = stack.enter_context(log.open("wb"))
            worker = worker_process(folder, tmp_path / "registry", *FLAGS, stderr=stderr)
            process, address = stack.enter_context(worker)
            with NeapClient(address) as client:
                client.wait_ready(SERVICE_NAME, timeout_s=60)
            processes.append(process)
            addresses.append(address)
        target = f"ipv4:{','.join(addresses)}"
        # Refused many times while the queues are full, and answered in the end.
        client = stack.enter_context(NeapClient(target, num_attempts=1000))
        slow = stack.enter_context(grpc.insecure_channel(target, options=SMALL_WINDOW))
        kinds = [(number, sampled) for number in range(NUM_PROMPTS) for sampled in (False, True)]
        alone = {kind: list(client.answer(_request(*kind)).token_ids) for kind in kinds}
        clients = Clients(client, slow, alone)
        stack.callback(clients.stop)
        for process in processes:
            assert _growth(process, SOAK_S / 2) < MAX_GROWTH_BYTES
            if process is processes[-1]:
                clients.stop()
            process.terminate()
            assert process.wait(120) == 0
    seen, codes = clients.seen, sum(map(_logged, logs), Counter())
    print(f"{dict(seen)}; {clients.num_calls} calls; logged {dict(codes)}")
    assert not clients.wrong, clients.wrong[:20]
    assert {("_answer", "finished"), ("_bad", "rejected"), ("_slow_reader", "ended")} <= set(seen)
    assert not {"INTERNAL", "UNKNOWN"} & set(codes)
    assert codes["INVALID_ARGUMENT"] + codes["NOT_FOUND"] == clients.num("rejected")
    # A call that its client cancelled, or whose deadline passed, may be logged as answered, and one that reached no
    # worker is not logged.
    finished = clients.num("finished") + len(alone)
    most = finished + clients.num("cancelled", "too late", "caught up")
    assert finished <= codes["OK"] <= most
    least = seen.total() - clients.num("too late", "refused") + len(alone)
    assert least <= codes.total() <= clients.num_calls + len(alone)
