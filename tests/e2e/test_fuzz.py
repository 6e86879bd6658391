"""Every call of both services with absurd messages and with garbage: each is answered with a status that says whose
mistake it is."""

import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import grpc
import psutil
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from neap_client.calibration.v1 import calibration_pb2
from neap_client.inference.v1 import inference_pb2
from neap_client.router.v1 import router_pb2
from smg_grpc_proto.generated import vllm_engine_pb2

from tests.calibrator_service.conftest import Service
from tests.fuzzing import SECONDS, cases, garbage, random_message
from tests.generation import publish, request_of
from tests.waiting import wait_until
from tests.worker import serving

pytestmark = pytest.mark.full

SIDE = [*health_pb2.DESCRIPTOR.services_by_name.values(), *reflection_pb2.DESCRIPTOR.services_by_name.values()]
# Nobody's mistake but the service's.
FAILURES = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DATA_LOSS}
# All others are UNIMPLEMENTED.
SERVED_OF_DIALECT = {"Generate", "Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads", "GetTokenizer"}
MAX_EVENTS = 20
NUM_CALLERS, BATCH = 8, 32
# What pools may still grow by once half of the cases are through.
SLACK_THREADS, SLACK_FILES = 4, 6


def methods(*modules) -> list[MethodDescriptor]:
    services = [s for module in modules for s in module.DESCRIPTOR.services_by_name.values()]
    return [method for service in (*services, *SIDE) for method in service.methods]


def call(channel: grpc.Channel, method: MethodDescriptor, data: bytes) -> grpc.StatusCode:
    """Sends `data` as the request and takes what comes, for a short while."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.client_streaming:
            events = channel.stream_stream(path)(iter([data]), timeout=0.2)
        elif method.server_streaming:
            events = channel.unary_stream(path)(data, timeout=0.2)
        else:
            channel.unary_unary(path)(data, timeout=5)
            return grpc.StatusCode.OK
        for number, _ in enumerate(events):
            if number == MAX_EVENTS:
                events.cancel()
                break
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def noise(target: str, chance: random.Random) -> None:
    """Bytes that are no HTTP/2, or that begin as if they were."""
    host, _, port = target.rpartition(":")
    start = chance.choice((b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(start + chance.randbytes(chance.choice((0, 9, 500))))


def fuzz(target: str, methods: list[MethodDescriptor], process: psutil.Process) -> Counter[str]:
    """Calls all `methods` again and again, several at once. Returns how often each status came, by name."""

    def one(case: tuple[int, random.Random]) -> str:
        seed, chance = case
        method = methods[seed % len(methods)]
        make = garbage if chance.random() < 0.3 else random_message
        made = make(method.input_type, chance)
        data = made if isinstance(made, bytes) else made.SerializeToString()
        code = call(channel, method, data)
        assert code not in FAILURES, f"{method.full_name} {code} with seed {seed}"
        if chance.random() < 0.05:
            noise(target, chance)
        return str(code.name)

    seen: Counter[str] = Counter()
    held: tuple[int, int] | None = None
    started_s, todo = time.monotonic(), cases()
    with grpc.insecure_channel(target) as channel, ThreadPoolExecutor(NUM_CALLERS) as pool:
        while batch := list(islice(todo, BATCH)):
            seen.update(pool.map(one, batch))
            if held is None and time.monotonic() - started_s > SECONDS / 2:
                held = (process.num_threads(), process.num_fds())
    wait_until(lambda: process.num_threads() <= held[0] + SLACK_THREADS)
    wait_until(lambda: process.num_fds() <= held[1] + SLACK_FILES)
    return seen


@pytest.mark.e2e
def test_a_worker(engine, registry):
    publish(registry, engine)
    with serving(engine, registry, max_active=NUM_CALLERS, dialect=True) as worker:
        theirs = [method for method in methods(vllm_engine_pb2) if method.name in SERVED_OF_DIALECT]
        seen = fuzz(worker.target, [*methods(inference_pb2), *theirs], psutil.Process())
        assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= set(seen)
        wait_until(lambda: engine.num_running == engine.num_waiting == 0)
        with grpc.insecure_channel(worker.target) as channel:
            request = request_of(3)
            generate = channel.unary_stream("/neap.inference.v1.InferenceService/Generate")
            # All places are free again: as many calls as there are places are served at once. Each is out of the
            # engine's queue, which is shorter, before the next one is made.
            calls = []
            for _ in range(NUM_CALLERS):
                calls.append(generate(request.SerializeToString(), timeout=60))
                next(calls[-1])
                wait_until(lambda: engine.num_waiting == 0)
            assert min(len(list(call)) for call in calls) >= 2


@pytest.mark.e2e
def test_a_calibrator(tmp_path):
    service = Service(tmp_path, "--model", "tiny=/nowhere", "--max-queued-jobs", "2")
    try:
        process = psutil.Process(service.process.pid)
        seen = fuzz(service.target, methods(calibration_pb2, router_pb2), process)
        assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= set(seen)
        service.calibrations.ListCalibrations(calibration_pb2.ListCalibrationsRequest(), timeout=20)
        assert service.process.poll() is None
    finally:
        assert service.terminate() == 0
    assert '"event": "unexpected error"' not in (tmp_path / "service.log").read_text()
