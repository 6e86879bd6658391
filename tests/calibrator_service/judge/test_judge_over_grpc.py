"""The judge in a calibration service's process, over gRPC: reports of a worker, orders, roles, and SIGKILL."""

import math
import time

import grpc
import pytest
from neap_client.router.v1 import router_pb2 as pb

from shared.errors import InvalidInput, Unavailable
from shared.registry.factory import open_registry
from tests.calibrator_service.conftest import Service, error_of
from tests.manifests import real_manifest
from tests.tokens import bearer, write_tokens
from tests.waiting import wait_until

FLAGS = ("--model", "tiny=/nowhere", "--judge", "publications")


@pytest.fixture
def judging(start_service, tmp_path) -> Service:
    with_versions(tmp_path)
    return start_service(*FLAGS, patch=QUICK)


# As services are configured, but with a short lease, so that one that follows a killed one need not wait for it.
QUICK = "from shared.registry import lease; lease.Lease.__init__.__kwdefaults__['lasts_s'] = 3.0"


def with_versions(folder) -> None:
    registry = open_registry(str(folder / "registry"))
    for number in (1, 2, 3):
        aliases = ["stable"] if number == 1 else []
        manifest = {**real_manifest(), "number": number}
        registry.publish("tiny", manifest, {"x": b"weights"}, request_id=str(number), aliases=aliases)
    registry.close()


class Reporter:
    """Reports answers that take so many seconds per token, by version."""

    def __init__(self, service: Service, speeds: dict[int, float], worker_id: str = "a" * 32) -> None:
        self.service, self.speeds, self.worker_id, self.sequence = service, speeds, worker_id, 0

    def request(self, **changes: object) -> pb.ReportServedRequest:
        count = self.sequence - 1
        served = [
            pb.Served(
                alias="stable",
                version=version,
                num_requests=8 * count,
                num_tokens=800 * count,
                num_passes=400 * count,
                num_drafted=700 * count,
                seconds=800 * count * took,
                full_seconds=1000 * count * took,
                weight=800 * count,
                weighted_log=800 * count * math.log(took),
            )
            for version, took in self.speeds.items()
        ]
        values = {"worker_id": self.worker_id, "sequence": self.sequence, "model_id": "tiny", "served": served}
        return pb.ReportServedRequest(**{**values, **changes})

    def report(self, metadata=()) -> bool:
        self.sequence += 1
        return self.service.routers.ReportServed(self.request(), metadata=metadata, timeout=30).is_new


def acting(service: Service) -> bool:
    return service.routers.GetJudged(pb.GetJudgedRequest(model_id="tiny"), timeout=30).is_acting


def stable(service: Service) -> pb.Alias:
    answer = service.routers.ListAliases(pb.ListAliasesRequest(model_id="tiny"), timeout=30)
    return next(alias for alias in answer.aliases if alias.name == "stable")


def begin(service: Service, version: int, **more) -> pb.AliasChange:
    request = pb.BeginTrialRequest(model_id="tiny", alias="stable", version=version, **more)
    return service.routers.BeginTrial(request, timeout=30).change


@pytest.mark.full
def test_a_trial_survives_the_death_of_its_service_and_ends_in_a_promotion(judging):
    wait_until(lambda: acting(judging))
    change = begin(judging, 2, actor="ann", reason="more text")
    assert (change.canary.version, change.canary.share_per_mille, change.actor) == (2, 50, "judge")
    assert "asked by ann: more text" in change.reason
    deaths, reporter = 0, Reporter(judging, {1: 0.013, 2: 0.01})
    while stable(judging).version == 1:
        reporter.report()
        time.sleep(0.2)  # the judge looks once a second
        share = stable(judging).canary.share_per_mille
        if deaths < 2 and share > 50 * 4**deaths:  # it has just grown
            judging.kill()
            judging.start()
            wait_until(lambda: acting(judging))
            deaths += 1
        assert reporter.sequence < 300
    assert deaths
    history = judging.routers.GetAliasHistory(pb.GetAliasHistoryRequest(model_id="tiny", alias="stable")).changes
    shares = [entry.canary.share_per_mille for entry in reversed(history) if entry.HasField("canary")]
    assert shares == sorted(set(shares))
    assert history[0].reason.startswith("promote: 1.3")


@pytest.mark.full
def test_what_a_job_publishes_is_tried_before_it_serves(judging):
    wait_until(lambda: acting(judging))
    first = judging.end_of(judging.create(request_id="one", aliases=["fresh"]))
    assert judging.aliases()["fresh"] == first.router_version  # there was none to compare with
    second = judging.end_of(judging.create(request_id="two", aliases=["fresh"]))
    answer = judging.routers.ListAliases(pb.ListAliasesRequest(model_id="tiny"), timeout=30)
    fresh = next(alias for alias in answer.aliases if alias.name == "fresh")
    assert (fresh.version, fresh.canary.version) == (first.router_version, second.router_version)
    third = judging.end_of(judging.create(request_id="three", aliases=["fresh"]))
    assert third.router_version
    assert judging.aliases()["fresh"] == first.router_version


def test_reports_that_cannot_be_are_refused_and_the_next_one_is_taken(judging):
    wait_until(lambda: acting(judging))
    reporter = Reporter(judging, {1: 0.01})
    assert reporter.report()
    reporter.sequence += 1
    entry = reporter.request().served[0]
    for wrong in (
        {"worker_id": "../../x"},
        {"sequence": 0},
        {"model_id": "a b"},
        {"served": [entry, entry]},
        {"served": [pb.Served(alias="stable", version=number + 1) for number in range(257)]},
        *({"served": [_changed(entry, seconds=value)]} for value in (math.nan, math.inf, -1.0, 1e300)),
        {"served": [_changed(entry, num_requests=2**62)]},
        {"served": [_changed(entry, load=2**31)]},
    ):
        error = error_of(lambda wrong=wrong: judging.routers.ReportServed(reporter.request(**wrong), timeout=30))
        assert isinstance(error, InvalidInput), wrong
    reporter.sequence -= 1
    assert reporter.report()
    again = judging.routers.ReportServed(reporter.request(), timeout=30)
    assert not again.is_new


def _changed(entry: pb.Served, **values: object) -> pb.Served:
    changed = pb.Served()
    changed.CopyFrom(entry)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


def test_orders(judging):
    wait_until(lambda: acting(judging))

    def order(**values) -> None:
        judging.routers.OrderJudge(pb.OrderJudgeRequest(model_id="tiny", **values), timeout=30)

    begin(judging, 2)
    order(action=pb.JUDGE_ACTION_HOLD, alias="stable")
    listed = judging.routers.GetJudged(pb.GetJudgedRequest(), timeout=30)
    assert [(entry.alias, entry.state) for entry in listed.aliases] == [("stable", "on trial, held")]
    order(action=pb.JUDGE_ACTION_FORBID, version=2)
    time.sleep(1.5)
    assert stable(judging).canary.version == 2
    order(action=pb.JUDGE_ACTION_RELEASE, alias="stable")
    wait_until(lambda: not stable(judging).HasField("canary"))
    assert error_of(lambda: begin(judging, 2)).reason == "FORBIDDEN_VERSION"
    order(action=pb.JUDGE_ACTION_ALLOW, version=2)
    begin(judging, 2)


@pytest.mark.full
def test_of_two_services_of_a_registry_one_takes_reports(judging, start_service, tmp_path):
    wait_until(lambda: acting(judging))
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    other = Service(other_folder, *FLAGS, "--registry", f"file://{tmp_path}/registry", patch=QUICK)
    try:
        error = error_of(lambda: Reporter(other, {1: 0.01}).report())
        assert (type(error), error.reason) == (Unavailable, "NOT_ACTING")
        begin(other, 2)
        assert Reporter(judging, {1: 0.01}).report()
        judging.kill()
        wait_until(lambda: acting(other))
        assert Reporter(other, {1: 0.01}).report()
    finally:
        other.terminate()
        judging.start()


def test_roles(start_service, tmp_path):
    with_versions(tmp_path)
    tokens = write_tokens(tmp_path / "tokens")
    service = start_service(*FLAGS, "--auth-tokens", str(tmp_path / "tokens"), patch=QUICK)
    admin, calibrate, generate = (bearer(tokens[role]) for role in ("admin", "calibrate", "generate"))
    reporter = Reporter(service, {1: 0.01})
    for metadata in (admin, generate, ()):
        error = error_of(lambda metadata=metadata: reporter.report(metadata))
        assert error.reason in ("ROLE_MISSING", "TOKEN_MISSING")

    def taken() -> bool:
        try:
            return reporter.report(calibrate)
        except grpc.RpcError:
            return False

    wait_until(taken)
    order = pb.OrderJudgeRequest(model_id="tiny", action=pb.JUDGE_ACTION_HOLD, alias="stable")
    trial = pb.BeginTrialRequest(model_id="tiny", alias="stable", version=2)
    for call, request in ((service.routers.OrderJudge, order), (service.routers.BeginTrial, trial)):
        error = error_of(lambda call=call, request=request: call(request, metadata=calibrate, timeout=30))
        assert error.reason == "ROLE_MISSING"
        call(request, metadata=admin, timeout=30)
