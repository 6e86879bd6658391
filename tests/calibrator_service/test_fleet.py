"""Workers write a calibration's text. One that is lost costs its unanswered prompts only."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from calibrator_service import fleet
from calibrator_service.calibration.text.engine_writer import EngineWriter
from calibrator_service.calibration.text.writer import Pace, WriteRequest, write_all
from calibrator_service.fleet import FleetWriter
from shared.engine.engine import Engine
from shared.engine.request.request import GenerationRequest
from shared.errors import Cancelled, PreconditionFailed
from shared.model.fingerprint import Identity
from shared.model.loaded import LoadedModel, wrap_model
from shared.registry.factory import open_registry
from tests.worker import EOS, build_model, build_tokenizer, serving

REQUESTS = [
    WriteRequest((40 + i, 60, 70), 24, temperature=float(i % 2), top_p=0.9, seed=i, stop_loops=False) for i in range(20)
]
NOWHERE = "127.0.0.1:9"


def model() -> LoadedModel:
    return wrap_model(build_model(), build_tokenizer(), model_id="tiny")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return model()


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[tuple[int, ...]]:
    writer = EngineWriter(loaded, 4)
    try:
        return [written.tokens for written in write_all(writer, REQUESTS, Pace())]
    finally:
        writer.close()


@contextmanager
def worker(tmp_path: Any) -> Iterator[Any]:
    with Engine(model()) as engine, serving(engine, open_registry(str(tmp_path))) as state:
        yield state


@pytest.fixture
def local(loaded: LoadedModel) -> Iterator[EngineWriter]:
    writer = EngineWriter(loaded, 4)
    yield writer
    writer.close()


def written(writer: FleetWriter, requests: list[WriteRequest] = REQUESTS, **pace: Any) -> Any:
    try:
        return write_all(writer, requests, Pace(**pace))
    finally:
        writer.close()


def test_workers_write_what_the_model_would(loaded, local, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "write", lambda *_: pytest.fail("written here") if _[0]() else iter(()))
    asked: list[GenerationRequest] = []
    real = Engine.submit

    def submit(self, prompt, *rest, **options):
        asked.append(prompt)
        return real(self, prompt, *rest, **options)

    monkeypatch.setattr(Engine, "submit", submit)
    counted: list[int] = []
    with worker(tmp_path / "a") as one, worker(tmp_path / "b") as other:
        fleet_writer = FleetWriter([one.target, other.target], loaded, local)
        found = written(fleet_writer, on_tokens=counted.append)
        assert min(w.engine.statistics.num_requests for w in (one, other)) > 0
    assert [answer.tokens for answer in found] == expected
    assert sum(counted) == sum(map(len, expected))
    assert not any(answer.is_choice for answer in found)
    assert len(asked) == len(REQUESTS)
    assert all(request.priority == 100 for request in asked)


@pytest.mark.full
def test_a_worker_that_dies_costs_its_unanswered_prompts_only(loaded, local, expected, tmp_path):
    with ExitStack() as first, worker(tmp_path / "b") as other:
        dying = first.enter_context(worker(tmp_path / "a"))
        killed: list[bool] = []

        def die(num_tokens: int) -> None:
            if num_tokens and not killed:
                killed.append(True)
                first.close()  # its streams end in the middle

        fleet_writer = FleetWriter([dying.target, other.target], loaded, local)
        found = written(fleet_writer, on_tokens=die)
        assert killed
        assert other.engine.statistics.num_requests < len(REQUESTS) + fleet.ROWS_PER_WORKER
    assert [answer.tokens for answer in found] == expected


@pytest.mark.full
def test_without_a_worker_left_the_rest_is_written_here(loaded, local, expected, tmp_path):
    with ExitStack() as first:
        dying = first.enter_context(worker(tmp_path))

        def die(num_tokens: int) -> None:
            if num_tokens:
                first.close()

        found = written(FleetWriter([dying.target, NOWHERE], loaded, local), on_tokens=die)
    assert [answer.tokens for answer in found] == expected
    assert any(answer.is_choice for answer in found)
    nobody = written(FleetWriter([NOWHERE], loaded, local), REQUESTS[:3])
    assert [answer.tokens for answer in nobody] == expected[:3]


def test_another_model_is_refused(loaded, local, tmp_path):
    with worker(tmp_path) as one:
        for other in (replace(loaded, identity=Identity.of("other")), replace(loaded, context_length=9999)):
            with pytest.raises(PreconditionFailed) as caught:
                written(FleetWriter([one.target], other, local))
            assert caught.value.reason == "WORKER_HAS_OTHER_MODEL"


def test_late_and_cancelled(loaded, local, tmp_path):
    with worker(tmp_path) as one:
        num_written = [0]

        def count(num_tokens: int) -> None:
            num_written[0] += num_tokens

        long = [replace(request, max_new_tokens=1500) for request in REQUESTS]
        late = FleetWriter([one.target], loaded, local)
        found = written(late, long, is_late=lambda: num_written[0] > 0, on_tokens=count)
        assert any(answer.tokens for answer in found)
        assert not all(answer.tokens for answer in found)
        with pytest.raises(Cancelled):
            written(FleetWriter([one.target], loaded, local), long, should_stop=lambda: True)


def test_an_answer_ends_as_it_would_here(loaded, tmp_path):
    """An end-of-sequence token is a part of it, a stop token is not."""
    writer = EngineWriter(loaded, 4)
    free = write_all(writer, [WriteRequest((40, 60), 40, stop_loops=False)], Pace())[0].tokens
    stop = next(token for token in free if token != EOS)
    request = WriteRequest((40, 60), 40, frozenset({stop}), stop_loops=False)
    here = write_all(writer, [request], Pace())[0].tokens
    with worker(tmp_path) as one:
        there = written(FleetWriter([one.target], loaded, writer), [request])[0].tokens
    assert there == here == free[: free.index(stop)]
