"""A worker's reports to a calibrator that answers, refuses, or is away, and what requests see of it."""

import threading
from collections import Counter
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from neap_client import NeapClient
from neap_client.router.v1 import router_pb2 as pb
from neap_client.router.v1 import router_pb2_grpc

from inference_service import served_reports
from inference_service.metrics import WorkerMetrics
from inference_service.served_reports import ServedReports
from shared.errors import InvalidInput, NeapError, Unavailable
from shared.ladder.artefact import pack_ladder
from shared.registry.factory import open_registry
from shared.rpc.status import code_of, to_status, trailing_metadata
from shared.served import Served, ServedKey
from tests.fixed_costs import fixed_cost_engine
from tests.generation import EXACT, request_of
from tests.waiting import wait_until
from tests.worker import build_ladder, serving

KEY = ServedKey("latest", 3, 1)
SUMS = Served(2, 40, 25, 30, 1.0, 1.4, 40.0, -140.0)


class Calibrator(router_pb2_grpc.RouterServiceServicer):
    """Keeps what it gets, and answers or refuses."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.error: NeapError | None = None
        self.suspended: list[str] = []

    def ReportServed(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        if self.error is not None:
            context.set_trailing_metadata(trailing_metadata(to_status(self.error)))
            context.abort(code_of(self.error), self.error.message)
        return pb.ReportServedResponse(is_new=True, suspended_aliases=self.suspended)


@pytest.fixture
def calibrator():
    made = Calibrator()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    router_pb2_grpc.add_RouterServiceServicer_to_server(made, server)
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made
    server.stop(None)


def engine_of(sums: dict[ServedKey, Served]) -> Any:
    return SimpleNamespace(
        loaded=SimpleNamespace(model_id="tiny"), statistics=SimpleNamespace(served=SimpleNamespace(by_key=sums))
    )


@pytest.fixture
def start():
    started = []

    def start(*addresses: str, sums=None, **options: Any) -> ServedReports:
        engines = [engine_of({KEY: SUMS} if sums is None else sums)]
        made = ServedReports(engines, addresses, 0.1, metrics=options.pop("metrics", WorkerMetrics()), **options)
        started.append(made)
        return made

    yield start
    for reports in started:
        reports.stop()


def test_each_report_has_the_sums_so_far_and_the_next_number(calibrator, start):
    sums = {KEY: SUMS}
    start(calibrator.address, sums=sums)
    wait_until(lambda: len(calibrator.requests) >= 2)
    sums[KEY] = SUMS.plus(SUMS)
    wait_until(lambda: calibrator.requests[-1].served[0].num_requests == 4)
    assert [request.sequence for request in calibrator.requests] == [*range(1, len(calibrator.requests) + 1)]
    assert len({request.worker_id for request in calibrator.requests}) == 1
    (entry,) = calibrator.requests[0].served
    assert (entry.alias, entry.version, entry.load) == KEY
    assert Served._make(getattr(entry, name) for name in Served._fields) == SUMS


def test_after_a_calibrator_that_does_not_act_the_next_one_is_asked(calibrator, start):
    metrics = WorkerMetrics()
    calibrator.error = Unavailable("another one judges", reason="NOT_ACTING")
    start("127.0.0.1:1", calibrator.address, metrics=metrics)
    wait_until(lambda: len(calibrator.requests) >= 2)
    calibrator.error = None
    wait_until(lambda: _counted(metrics)["sent"] >= 3)
    assert _counted(metrics)["NOT_ACTING"] >= 1


def _counted(metrics: WorkerMetrics) -> Counter:
    samples = next(family for family in metrics.registry.collect() if family.name == "neap_served_reports").samples
    return Counter({sample.labels["outcome"]: sample.value for sample in samples})


def test_a_refused_worker_begins_anew_under_another_id(calibrator, start):
    calibrator.error = InvalidInput("another caller", reason="BAD_REPORT")
    start(calibrator.address)
    wait_until(lambda: len({request.worker_id for request in calibrator.requests}) >= 2)
    calibrator.error = None
    wait_until(lambda: calibrator.requests[-1].sequence >= 3)


def test_a_calibrator_that_never_answers_holds_up_neither_requests_nor_the_end(loaded, tmp_path, monkeypatch):
    """It takes the call and says nothing."""
    monkeypatch.setattr(served_reports, "TIMEOUT_S", 0.5)
    asked, silent = threading.Event(), Calibrator()

    def wait(request: Any, context: Any) -> Any:
        asked.set()
        while context.is_active():
            threading.Event().wait(0.05)

    silent.ReportServed = wait
    server = grpc.server(futures.ThreadPoolExecutor(2))
    router_pb2_grpc.add_RouterServiceServicer_to_server(silent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    registry = open_registry(str(tmp_path / "registry"))
    with fixed_cost_engine(loaded) as engine, serving(engine, registry) as worker, NeapClient(worker.target) as client:
        reports = ServedReports([engine], [f"127.0.0.1:{port}"], 0.1, metrics=WorkerMetrics())
        assert asked.wait(60)
        stream = client.generate(request_of(12, text="hello", depth=EXACT))
        list(stream)
        assert len(stream.token_ids) == 12
        reports.stop()
    server.stop(None)
    registry.close()


def test_behind_a_suspended_alias_no_router_drafts_until_it_is_told_otherwise(loaded, tmp_path, calibrator, start):
    registry = open_registry(str(tmp_path / "registry"))
    manifest, blobs = pack_ladder(build_ladder(loaded), {"number": 1})
    registry.publish("tiny", manifest, blobs, request_id="1", aliases=["latest", "stable"])
    with fixed_cost_engine(loaded) as engine, serving(engine, registry) as worker, NeapClient(worker.target) as client:
        start(calibrator.address, on_suspended=worker.store.suspend)

        def version(**router: Any) -> tuple[int, tuple[int, ...]]:
            request = request_of(24, text="hello hello hello", depth=EXACT)
            for name, value in router.items():
                setattr(request.router, name, value)
            stream = client.generate(request)
            started = next(stream).started
            list(stream)
            return started.router_version, tuple(stream.token_ids)

        number, answer = version()
        assert number == 1
        keys = set(engine.statistics.served.by_key)
        assert {(key.alias, key.version) for key in keys} == {("latest", 1)}
        calibrator.suspended = ["latest"]
        wait_until(lambda: version()[0] == 0)
        assert version() == (0, answer)
        assert version(alias="stable")[0] == 1
        assert version(version=1)[0] == 1
        assert ("", 1) in {(key.alias, key.version) for key in engine.statistics.served.by_key}
        calibrator.suspended = []
        wait_until(lambda: version()[0] == 1)
    registry.close()
