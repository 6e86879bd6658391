"""What a worker keeps of the answers that it serves, and that no answer suffers from it."""

import errno
import math
import threading
import time
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import structlog
from neap_client.channel import ON_BEHALF_KEY
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc

from inference_service.metrics import WorkerMetrics
from inference_service.tap import ANY_POOL, Tap
from shared.engine.engine import Engine
from shared.engine.request.request import GenerationRequest
from shared.pool_names import DEFAULT_POOL
from shared.registry.factory import open_registry, open_store
from shared.rpc.access import Access
from shared.rpc.callers import Role
from shared.rpc.security import ServerSecurity
from shared.traffic.answer import HOUR_S
from shared.traffic.traffic import Traffic, open_traffic
from tests.generation import EXACT, answer, request_of
from tests.registry_servers import bucket_url
from tests.s3_gate import s3_gate
from tests.tokens import bearer, write_tokens
from tests.waiting import wait_until
from tests.worker import serving

DAY_S = 24 * 3600.0


@pytest.fixture(scope="module")
def engine(loaded: Any) -> Iterator[Engine]:
    with Engine(loaded, max_running=4) as engine:
        yield engine


@contextmanager
def worker(
    engine: Engine, folder: Path, traffic: Traffic | None = None, shares: dict[str, float] | None = None, **options: Any
) -> Iterator[SimpleNamespace]:
    """One that keeps everything, and writes at once where nothing runs."""
    tokens = write_tokens(folder / "tokens", dict.fromkeys(POOLS, (Role.GENERATE,)), POOLS)
    registry = open_registry(str(folder / "registry"))
    metrics = WorkerMetrics()
    traffic = traffic or open_traffic(str(folder / "registry"))
    timing = {"idle_after_s": 0.0, "look_s": 0.01, "is_idle": lambda: True, "retention_s": DAY_S} | options
    tap = Tap(traffic, {ANY_POOL: 1.0} if shares is None else shares, metrics, **timing)
    security = ServerSecurity(access=Access(folder / "tokens"))
    try:
        with (
            serving(engine, registry, metrics=metrics, security=security, tap=tap) as state,
            grpc.insecure_channel(state.target) as channel,
        ):
            state.stub = inference_pb2_grpc.InferenceServiceStub(channel)
            state.as_caller = {name: bearer(token) for name, token in tokens.items()}
            state.metrics, state.tap, state.traffic, state.tokens = metrics, tap, traffic, tokens
            yield state
    finally:
        tap.close()
        registry.close()


POOLS = {"ann-planted": "legal", "bob-planted": "shop", "eve-planted": DEFAULT_POOL}


def kept(state: SimpleNamespace, pool: str = "legal") -> list[tuple[list[int], list[int]]]:
    answers = state.traffic.read("tiny", pool).answers
    return [(list(answer.prompt_ids), list(answer.answer_ids)) for answer in answers]


def counts(metrics: WorkerMetrics, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(value for key, value in sample.labels.items() if key != "model_id"): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def ask(state: SimpleNamespace, caller: str = "ann-planted", max_tokens: int = 8, **changes: Any) -> list[int]:
    request = request_of(max_tokens, **changes)
    _, tokens, _, _ = answer(state.stub, request, metadata=state.as_caller[caller])
    return [token.id for token in tokens]


def test_the_objects_have_the_tokens_and_nothing_of_the_caller(engine: Engine, tmp_path: Path) -> None:
    """Names, tokens, request ids, addresses and texts are planted, and searched in every byte that is stored."""
    request_id, behind = "request-planted-0815", "behind-planted"
    with worker(engine, tmp_path) as state:
        metadata = (*state.as_caller["ann-planted"], ("x-request-id", request_id), (ON_BEHALF_KEY, behind))
        request = request_of(8, text="hello planted", depth=EXACT, sampling=pb.Sampling(temperature=1.0, seed=4711))
        started, tokens, texts, _ = answer(state.stub, request, metadata=metadata)
        assert started.request_id == request_id
        wait_until(lambda: kept(state))
        secrets = list(state.tokens.values())
        (found,) = state.traffic.read("tiny", "legal").answers
    prompt_ids = engine.loaded.tokenizer("hello planted").input_ids
    assert (list(found.prompt_ids), list(found.answer_ids)) == (prompt_ids, [token.id for token in tokens])
    assert (found.router_version, found.numerics_id) == (0, engine.numerics.id)
    assert abs(found.hour - time.time() / HOUR_S) <= 1
    files = list((tmp_path / "registry" / "traffic").rglob("*"))
    objects = [path.read_bytes() for path in files if path.is_file()]
    assert len(objects) == 1
    stored = b"".join(data + zlib.decompress(data[14:]) for data in objects) + "".join(map(str, files)).encode()
    written = [request_id, behind, "ann-planted", "generate", "127.0.0.1", "ipv4", "hello", "4711", *secrets]
    assert [text for text in (*written, *filter(None, texts)) if len(text) > 3 and text.encode() in stored] == []
    # All that is there is what the format says: the sizes of its fields leave room for nothing else.
    size = 2 + len("tiny") + 2 + len("legal") + 8 + 16 + 4 + 2 + len(found.numerics_id) + 8 + 4 * found.num_tokens
    assert len(zlib.decompress(objects[0][14:])) == size


def test_each_pool_has_its_own_and_callers_without_one_the_model_s(engine: Engine, tmp_path: Path) -> None:
    with worker(engine, tmp_path) as state:
        made = {pool: ask(state, caller, text=f"to {pool}") for caller, pool in POOLS.items()}
        for pool, token_ids in made.items():
            wait_until(lambda pool=pool: kept(state, pool))
            assert kept(state, pool) == [(engine.loaded.tokenizer(f"to {pool}").input_ids, token_ids)]
        assert sorted(state.traffic.pools("tiny")) == sorted(POOLS.values())
        wait_until(lambda: len(counts(state.metrics, "neap_learn_answers_total")) == 3)
        assert set(counts(state.metrics, "neap_learn_answers_total").values()) == {1.0}
        found = counts(state.metrics, "neap_learn_tokens_total")
        assert found["legal",] == len(engine.loaded.tokenizer("to legal").input_ids) + 8


def test_only_pools_that_are_named_and_requests_that_do_not_say_never(engine: Engine, tmp_path: Path) -> None:
    with worker(engine, tmp_path, shares={"legal": 1.0, "shop": 0.0}) as state:
        ask(state, learn=pb.LEARN_NEVER)
        ask(state, "bob-planted")
        ask(state, "eve-planted")
        last = ask(state)
        wait_until(lambda: kept(state))
        state.tap.close()
        assert [tokens for _, tokens in kept(state)] == [last]
        assert state.traffic.pools("tiny") == ["legal"]


def test_a_share_of_the_answers_is_kept(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([0.29, 0.3, 0.0, 0.99])
    monkeypatch.setattr("inference_service.tap.random.random", lambda: next(drawn))
    with worker(engine, tmp_path, shares={"legal": 0.3}) as state:
        made = [ask(state, max_tokens=number) for number in (3, 4, 5, 6)]
        state.tap.close()
        assert sorted(kept(state)) == sorted((engine.loaded.tokenizer("hello").input_ids, made[n]) for n in (0, 2))


def test_sampled_and_constrained_answers_count_and_those_that_failed_or_were_cut_do_not(
    engine: Engine, tmp_path: Path
) -> None:
    with worker(engine, tmp_path) as state:
        metadata = state.as_caller["ann-planted"]
        made = [
            ask(state, sampling=pb.Sampling(temperature=1.5, seed=3), depth=EXACT),
            ask(state, max_tokens=None, constraint=pb.Constraint(choice=pb.Choice(texts=["inin"]))),
        ]
        cut = state.stub.Generate(request_of(1500), metadata=metadata)
        while not next(cut).chunk.tokens:
            pass
        cut.cancel()
        with pytest.raises(grpc.RpcError):
            list(state.stub.Generate(request_of(1900), metadata=metadata, timeout=0.3))
        nothing = request_of(prompt_logprobs=1, stopping=pb.Stopping(max_tokens=0))
        list(state.stub.Generate(nothing, metadata=metadata))  # there is no answer
        wait_until(lambda: engine.num_running == 0)
        state.tap.close()
        assert sorted(tokens for _, tokens in kept(state)) == sorted(made)


def test_an_answer_that_goes_on_here_is_kept_once_and_whole(engine: Engine, tmp_path: Path) -> None:
    with worker(engine, tmp_path) as state:
        whole = ask(state, max_tokens=12)
        rest = ask(state, max_tokens=12, resume=pb.Resume(token_ids=whole[:5]))
        assert whole[5:] == rest
        state.tap.close()
        assert [tokens for _, tokens in kept(state)] == [whole, whole]


class BrokenStore:
    """Fails as a full disk or an absent bucket does, while it is told to."""

    def __init__(self, folder: Path) -> None:
        self.is_full = True
        self._store = open_store(str(folder), step=self._step)

    def _step(self, name: str) -> None:
        if self.is_full and name == "part:traffic":
            raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_full_disk_loses_what_is_to_be_learned_and_no_answer(engine: Engine, tmp_path: Path) -> None:
    store = BrokenStore(tmp_path / "registry")
    with structlog.testing.capture_logs() as logs, worker(engine, tmp_path, Traffic(store)) as state:  # type: ignore[arg-type]
        for number in range(1, 4):
            assert len(ask(state)) == 8
            expected = {("legal", "DISK_FULL"): float(number)}
            wait_until(lambda e=expected: counts(state.metrics, "neap_learn_lost_answers_total") == e)
        store.is_full = False
        ask(state)
        wait_until(lambda: kept(state))
        assert len(kept(state)) == 1
    events = [line["event"] for line in logs if line["event"].startswith("served answers")]
    assert len(events) == 2  # once, and that it is over
    assert events[0].startswith("served answers are not kept")
    assert events[1] == "served answers are kept again"


@pytest.mark.full  # servers that say 507 are looked at below
def test_an_absent_bucket_loses_what_is_to_be_learned_and_no_answer(
    engine: Engine, tmp_path: Path, own_s3: Any
) -> None:
    url = bucket_url(own_s3)
    own_s3.kill()
    with worker(engine, tmp_path, open_traffic(url)) as state:
        assert len(ask(state)) == 8
        wait_until(lambda: counts(state.metrics, "neap_learn_lost_answers_total"), timeout_s=120)
        assert counts(state.metrics, "neap_learn_lost_answers_total") == {("legal", "OBJECT_STORE_UNAVAILABLE"): 1.0}


@pytest.mark.parametrize(("status", "reason"), [(507, "OBJECT_STORE_UNAVAILABLE"), (403, "OBJECT_STORE_REFUSED")])
def test_a_full_bucket_loses_what_is_to_be_learned_and_no_answer(
    engine: Engine, tmp_path: Path, s3: Any, status: int, reason: str
) -> None:
    """Servers say so by Insufficient Storage, or by QuotaExceeded."""
    full = threading.Event()
    full.set()

    def gate(method: str, path: str, headers: Any) -> int | None:
        return status if method == "PUT" and full.is_set() else None

    url = bucket_url(s3)
    with s3_gate(s3.port, gate) as at, worker(engine, tmp_path, open_traffic(url.replace(s3.endpoint, at))) as state:
        assert len(ask(state)) == 8
        wait_until(lambda: counts(state.metrics, "neap_learn_lost_answers_total") == {("legal", reason): 1.0})
        full.clear()
        assert len(ask(state)) == 8
        wait_until(lambda: kept(state), timeout_s=60)
        assert len(kept(state)) == 1


def test_storage_that_hangs_holds_no_answer_up_and_takes_bounded_memory(engine: Engine, tmp_path: Path) -> None:
    go_on, writes = threading.Event(), threading.Event()
    traffic = open_traffic(str(tmp_path / "registry"))

    class Hanging:
        def write(self, answers: Any) -> None:
            writes.set()
            assert go_on.wait(60)
            traffic.write(answers)

        def __getattr__(self, name: str) -> Any:
            return getattr(traffic, name)

    with worker(engine, tmp_path, Hanging(), max_tokens=30) as state:  # type: ignore[arg-type]
        first = ask(state)
        assert writes.wait(60)
        others = [ask(state) for _ in range(5)]  # 9 or more tokens each, and 30 may wait
        assert len({*map(tuple, others)}) == 1
        lost = counts(state.metrics, "neap_learn_lost_answers_total")
        num_lost = lost["legal", "BUFFER_FULL"]
        size = len(first) + len(engine.loaded.tokenizer("hello").input_ids)
        assert num_lost == 5 - 30 // size
        go_on.set()
        state.tap.close()
        assert len(kept(state)) == 6 - num_lost


def offered(tap: Tap, *token_ids: int) -> None:
    tap.keep("tiny", "legal", "numerics", GenerationRequest(prompt_ids=(1, 2)), array("I", token_ids))


@contextmanager
def a_tap(folder: Path, **options: Any) -> Iterator[tuple[Tap, Traffic, WorkerMetrics]]:
    traffic, metrics = open_traffic(str(folder)), WorkerMetrics()
    timing = {"retention_s": DAY_S, "is_idle": lambda: True, "look_s": 0.01, "idle_after_s": 0.0} | options
    tap = Tap(traffic, {ANY_POOL: 1.0}, metrics, **timing)
    try:
        yield tap, traffic, metrics
    finally:
        tap.close()


def test_it_is_written_when_nothing_runs_or_when_it_has_waited_long(tmp_path: Path) -> None:
    looked, idle = threading.Semaphore(0), threading.Event()

    def is_idle() -> bool:
        looked.release()
        return idle.is_set()

    with a_tap(tmp_path, is_idle=is_idle) as (tap, traffic, _):
        offered(tap, 3)
        for _ in range(5):
            assert looked.acquire(timeout=60)
        assert traffic.batches("tiny", "legal") == []
        idle.set()
        wait_until(lambda: traffic.batches("tiny", "legal"))
    with a_tap(tmp_path / "other", is_idle=lambda: False, at_most_s=0.05) as (tap, traffic, _):
        offered(tap, 3)
        wait_until(lambda: traffic.batches("tiny", "legal"))
    with a_tap(tmp_path / "third", is_idle=lambda: False, max_tokens=8) as (tap, traffic, _):
        offered(tap, 3, 4, 5)  # more than half of what may wait
        wait_until(lambda: traffic.batches("tiny", "legal"))


def test_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    with a_tap(tmp_path, is_idle=lambda: False) as (tap, traffic, metrics):
        for number in range(3):
            offered(tap, number)
    assert len(traffic.batches("tiny", "legal")) == 1
    read = traffic.read("tiny", "legal").answers
    assert sorted(list(answer.answer_ids) for answer in read) == [[0], [1], [2]]
    assert [answer.id for answer in read] == sorted(answer.id for answer in read)  # no order of requests
    assert counts(metrics, "neap_learn_answers_total") == {("legal",): 3.0}


def test_a_clock_that_jumps_back_costs_nothing(tmp_path: Path) -> None:
    times = iter([1_000_000 * 3600.0, 3600.0, 0.0])
    with a_tap(tmp_path, clock=lambda: next(times)) as (tap, traffic, _):
        offered(tap, 1)
        wait_until(lambda: len(traffic.batches("tiny", "legal")) == 1)
        offered(tap, 2)
        offered(tap, 3)
        wait_until(lambda: len(traffic.batches("tiny", "legal")) == 3)
    assert [list(a.answer_ids) for a in traffic.read("tiny", "legal").answers] == [[3], [2], [1]]


def test_an_answer_that_is_too_long_is_counted_and_the_others_are_kept(tmp_path: Path) -> None:
    with a_tap(tmp_path, max_tokens=4 << 20) as (tap, traffic, metrics):
        offered(tap, *range(1 << 20))
        offered(tap, 1)
        wait_until(lambda: traffic.batches("tiny", "legal"))
    assert counts(metrics, "neap_learn_lost_answers_total") == {("legal", "TOO_LONG"): 1.0}
    assert len(traffic.read("tiny", "legal").answers) == 1


def test_whoever_writes_removes_what_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a minute, so that workers that start together do not all look."""
    with a_tap(tmp_path) as (tap, traffic, _):
        tap._expire_at_s = math.inf
        offered(tap, 1)
        wait_until(lambda: traffic.batches("tiny", "legal"))
    monkeypatch.setattr("inference_service.tap._FIRST_EXPIRY_WITHIN_S", 0.0)
    with a_tap(tmp_path, retention_s=-1.0) as (_, traffic, _):
        wait_until(lambda: not traffic.batches("tiny", "legal"))
