"""Deadlines, cancellation, clients that do not read, limits: whose slot is free again when."""

import gc
from types import SimpleNamespace

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc

from inference_service.convert import to_generation_request
from inference_service.servicer import InferenceServicer
from shared.engine.engine import Engine
from shared.errors import DeadlineExceeded, Exhausted
from shared.model.cache import ContiguousCache
from shared.model.load import load_model
from shared.rpc.callers import Role
from tests.generation import answer, explained, refused, request_of
from tests.hooked_runner import HookedRunner
from tests.waiting import wait_until
from tests.worker import serving

Code = grpc.StatusCode


class WatchedEngine(Engine):
    """Notes the handles that it gives out and, for each pass, whether the request of one of them was cancelled when it
    began."""

    def __init__(self, loaded):
        self.handles, self.steps = [], []
        super().__init__(loaded, max_queue=4, runner_of=HookedRunner)
        self.warm_up()
        self.runner.before["run"] = self.runner.before["run_ragged"] = self._note_pass

    def _note_pass(self, *_):
        self.steps.append(any(handle.is_cancelled for handle in self.handles))

    def submit(self, *args, **options):
        handle = super().submit(*args, **options)
        self.handles.append(handle)
        return handle


@pytest.fixture(scope="module")
def engine(folder):
    with WatchedEngine(load_model(folder, model_id="tiny")) as engine:
        yield engine


@pytest.fixture
def handles(engine):
    """`handles` and `steps` of the engine, empty at the start of the test."""
    engine.handles.clear()
    engine.steps.clear()
    return engine


SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]


@pytest.mark.parametrize("timeout_s", [0, -1])
def test_a_deadline_already_past(stub, handles, timeout_s):
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request_of(), timeout=timeout_s))
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    assert handles.handles == []


async def test_a_deadline_that_passed_on_the_way_is_refused_before_the_work(worker, handles):
    context = SimpleNamespace(time_remaining=lambda: -0.001)
    servicer: InferenceServicer = worker.servicer
    # Not even the prompt is looked at: this one would be refused for being empty.
    with pytest.raises(DeadlineExceeded):
        await servicer.Generate(request_of(text=""), context)
    assert handles.handles == []


def test_cancel_in_the_middle_frees_the_slot_within_one_step(stub, engine, handles):
    call = stub.Generate(request_of(2000))
    for _ in range(4):
        next(call)
    assert engine.num_running == 1
    call.cancel()
    wait_until(lambda: engine.num_running == 0)
    assert handles.handles[0].is_cancelled
    assert handles.steps.count(True) <= 1
    assert len(handles.steps) < 1900


def _stalled_call(stub, **options):
    """A call whose responses are large and not read; returns once it has started."""
    call = stub.Generate(request_of(2000, logprobs=20), **options)
    next(call)
    return call


def test_a_client_that_stops_reading_pauses_only_itself(stub, engine, handles):
    call = _stalled_call(stub)
    (handle,) = handles.handles
    wait_until(lambda: handle.is_paused)

    def num_steps_meanwhile():
        """Of an answer of five tokens to somebody else."""
        num_steps = len(handles.steps)
        _, tokens, _, _ = answer(stub, request_of(stopping=pb.Stopping(max_tokens=5)))
        assert len(tokens) == 5
        return len(handles.steps) - num_steps

    # What waits to be written goes out as one message. Once that is stuck, the request is not stepped any more.
    wait_until(lambda: handle.is_paused and num_steps_meanwhile() <= 6)
    num_steps = len(handles.steps)
    assert num_steps < 1900
    # And it goes on where it was.
    read = 0
    while read < num_steps + 50:
        read += len(next(call).chunk.tokens)
    call.cancel()
    wait_until(lambda: engine.num_running == 0)


def test_a_client_that_does_not_read_at_all_is_ended(engine, registry, handles):
    with (
        serving(engine, registry, stall_timeout_s=0.5) as worker,
        grpc.insecure_channel(worker.target, options=SMALL_WINDOW) as channel,
    ):
        call = _stalled_call(inference_pb2_grpc.InferenceServiceStub(channel))
        wait_until(lambda: handles.handles[0].is_cancelled)
        wait_until(lambda: engine.num_running == 0)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        code, info, _ = explained(caught.value)
        assert (code, info.reason) == (Code.RESOURCE_EXHAUSTED, "SLOW_READER")


def test_what_a_slow_reader_held_is_free_once_it_is_ended(registry, folder):
    # Other tests' engine keeps what its requests have read.
    num_caches = _num_caches()
    loaded = load_model(folder, model_id="tiny")
    request, _ = to_generation_request(request_of(2000), loaded, request_id="one")
    with Engine(loaded, kv_budget_bytes=1) as poor, pytest.raises(Exhausted) as caught:
        poor.submit(request)
    needed = int(caught.value.metadata["needed"])
    with (
        Engine(loaded, kv_budget_bytes=needed, prefix_cache_bytes=0) as engine,
        # Until it is over, the next request must have begun to wait, also on a busy machine.
        serving(engine, registry, stall_timeout_s=3.0) as worker,
        grpc.insecure_channel(worker.target, options=SMALL_WINDOW) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = _stalled_call(stub)
        wait_until(lambda: engine.num_running == 1)
        next_call = stub.Generate(request_of(stopping=pb.Stopping(max_tokens=5)))
        assert next(next_call).WhichOneof("event") == "started"
        # All room is taken, so it waits until the client that does not read is ended.
        assert engine.num_waiting == 1
        *_, last = next_call
        assert last.finished.usage.num_completion_tokens == 5
        assert last.finished.timing.queue.ToMilliseconds() > 0
        wait_until(lambda: engine.num_running == engine.num_waiting == 0)
        wait_until(lambda: _num_caches() == num_caches)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert explained(caught.value)[1].reason == "SLOW_READER"


def _num_caches():
    """KV caches of requests with anything in them, of any engine in this process.
    A runner keeps one of a single token for itself."""
    gc.collect()
    caches = [item for item in gc.get_objects() if type(item) is ContiguousCache]
    return sum(cache.capacity > 1 and bool(cache.keys) for cache in caches)


@pytest.mark.parametrize("limits", [{"max_active_per_client": 1}, {"max_active": 2}], ids=["set", "by default"])
def test_one_client_cannot_take_all_places(engine, registry, handles, limits):
    with serving(engine, registry, **limits) as worker, grpc.insecure_channel(worker.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(request_of(2000))
        next(call)
        code, info, _ = refused(stub, request_of())
        assert (code, info.reason) == (Code.RESOURCE_EXHAUSTED, "CLIENT_LIMIT")
        call.cancel()
        wait_until(lambda: engine.num_running == 0)
        answer(stub, request_of(stopping=pb.Stopping(max_tokens=1)))


def test_one_of_those_behind_a_gateway_leaves_room_for_the_others(registry, folder):
    with (
        Engine(load_model(folder, model_id="tiny"), max_running=9) as engine,
        serving(engine, registry, max_active=10) as worker,
        grpc.insecure_channel(worker.target) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.Generate(request_of(2000), metadata=(("x-neap-client", "ann"),)) for _ in range(4)]
        for call in calls:
            next(call)
        for name, code in (("ann", Code.RESOURCE_EXHAUSTED), ("bob", Code.OK), ("ann", Code.RESOURCE_EXHAUSTED)):
            call = stub.Generate(request_of(2000), metadata=(("x-neap-client", name),))
            if code is Code.OK:
                next(call)
                calls.append(call)
                continue
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert (caught.value.code(), explained(caught.value)[1].reason) == (code, "CLIENT_LIMIT")
        # Five of ten are the caller's own, whoever it says is behind it.
        with pytest.raises(grpc.RpcError):
            next(stub.Generate(request_of(), metadata=(("x-neap-client", "eve"),)))
        for call in calls:
            call.cancel()
        wait_until(lambda: engine.num_running == engine.num_waiting == 0)
        list(stub.Generate(request_of(1), metadata=(("x-neap-client", "ann"),)))


def test_beyond_the_queue_is_refused_with_a_time_to_retry(engine, registry, handles):
    sizes = {"max_active": 2, "max_active_per_client": 2}
    with serving(engine, registry, **sizes) as worker, grpc.insecure_channel(worker.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.Generate(request_of(2000)) for _ in range(2)]
        for call in calls:
            next(call)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request_of()))
        code, info, _ = explained(caught.value)
        assert (code, info.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        retry = error_details_pb2.RetryInfo()
        assert rpc_status.from_call(caught.value).details[1].Unpack(retry)
        assert retry.retry_delay.ToNanoseconds() > 0
        calls[0].cancel()
        wait_until(lambda: engine.num_running == 1)
        answer(stub, request_of(stopping=pb.Stopping(max_tokens=1)))
        calls[1].cancel()
        wait_until(lambda: engine.num_running == 0)


def test_a_call_that_would_wait_is_refused_where_its_client_asks_another_worker(registry, folder):
    with (
        Engine(load_model(folder, model_id="tiny"), max_running=1) as engine,
        serving(engine, registry) as worker,
        grpc.insecure_channel(worker.target) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        one = pb.Stopping(max_tokens=1)
        answer(stub, request_of(stopping=one, can_go_elsewhere=True))
        call = stub.Generate(request_of(2000))
        next(call)
        code, info, _ = refused(stub, request_of(can_go_elsewhere=True))
        assert (code, info.reason) == (Code.UNAVAILABLE, "BUSY")
        waiting = stub.Generate(request_of(stopping=one))
        call.cancel()
        assert [event.WhichOneof("event") for event in waiting][-1] == "finished"


@pytest.mark.full
def test_a_request_of_a_lower_number_runs_first_and_the_other_goes_on(registry, folder):
    with (
        Engine(load_model(folder, model_id="tiny"), max_running=1) as engine,
        serving(engine, registry, priority_of_roles={Role.GENERATE: -5}) as worker,
        grpc.insecure_channel(worker.target) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        alone = answer(stub, request_of(1500))[1]
        later = stub.Generate(request_of(1500, priority=-4))
        tokens = [*next(later).chunk.tokens, *next(later).chunk.tokens]
        # While its chunks wait for the server's loop it is paused, takes no place, and need not be put back.
        while not engine.statistics.num_put_back:
            answer(stub, request_of(3))
            assert later.is_active()
        tokens += [token for event in later for token in event.chunk.tokens]
        assert [token.id for token in tokens] == [token.id for token in alone]
