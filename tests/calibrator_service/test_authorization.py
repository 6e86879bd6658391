"""The calibration service with tokens: which actor is recorded, and how many may watch."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb
from neap_client.router.v1 import router_pb2

from calibrator_service import watchers
from calibrator_service.watchers import Watchers
from shared.errors import Exhausted
from tests.calibrator_service.conftest import error_of
from tests.tokens import bearer, write_tokens
from tests.waiting import wait_until


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    return write_tokens(tmp_path / "tokens")


def _create(request_id: str, *aliases: str) -> pb.CreateCalibrationRequest:
    spec = pb.CalibrationSpec(model_id="tiny", self_generated=pb.SelfGenerated(), aliases=list(aliases))
    return pb.CreateCalibrationRequest(request_id=request_id, spec=spec)


def test_who_moved_an_alias_is_what_the_token_says(start_service, tokens, tmp_path):
    service = start_service(*("--model", "tiny=/nowhere", "--auth-tokens", str(tmp_path / "tokens")))
    calibrate, admin = bearer(tokens["calibrate"]), bearer(tokens["admin"])
    create = service.calibrations.CreateCalibration
    job = create(_create("2", "latest"), metadata=calibrate, timeout=60).calibration
    request = pb.WatchCalibrationRequest(calibration_id=job.calibration_id)
    *_, last = service.calibrations.WatchCalibration(request, metadata=calibrate, timeout=60)
    assert last.calibration.state == pb.STATE_SUCCEEDED, last
    allowed = create(_create("3", "canary"), metadata=bearer(tokens["all"]), timeout=60)
    assert list(allowed.calibration.spec.aliases) == ["canary"]

    move = router_pb2.SetAliasRequest(model_id="tiny", alias="stable", version=1, actor="root")
    # Who it was is what the token says, whatever else the request claims.
    assert service.routers.SetAlias(move, metadata=admin, timeout=60).change.actor == "admin (root)"
    history = router_pb2.GetAliasHistoryRequest(model_id="tiny", alias="stable")
    (change,) = service.routers.GetAliasHistory(history, metadata=calibrate, timeout=60).changes
    assert change.actor == "admin (root)"
    log = (tmp_path / "service.log").read_text()
    assert f'"calibration_id": "{job.calibration_id}"' in log
    assert '"caller": "calibrate"' in log
    assert not any(token in log for token in tokens.values())


def test_watches_of_one_client_leave_room_for_others_and_watches_of_routers_for_those_of_jobs(
    start_service, tokens, tmp_path
):
    service = start_service(*("--model", "tiny=/nowhere", "--auth-tokens", str(tmp_path / "tokens")))
    request = router_pb2.WatchRequest(model_id="tiny")

    def watch(name: str) -> Any:
        return service.routers.Watch(request, metadata=bearer(tokens[name]), timeout=60)

    def num_refused(watches: list[Any]) -> int:
        return sum(not watch.is_active() for watch in watches)

    watches = [watch("generate") for _ in range(watchers.MAX_WATCHERS_PER_CLIENT + 1)]
    wait_until(lambda: num_refused(watches) == 1)
    (refused,) = (watch for watch in watches if not watch.is_active())
    assert error_of(lambda: next(refused)).reason == "TOO_MANY_WATCHERS"
    watches += [other := watch("calibrate"), watch("generate")]
    wait_until(lambda: num_refused(watches) == 2)
    assert other.is_active()
    job = service.calibrations.CreateCalibration(_create("4"), metadata=bearer(tokens["calibrate"]), timeout=60)
    asked = pb.WatchCalibrationRequest(calibration_id=job.calibration.calibration_id)
    assert next(service.calibrations.WatchCalibration(asked, metadata=bearer(tokens["calibrate"]), timeout=60))
    for each in watches:
        each.cancel()


async def test_kinds_of_watches_are_counted_apart():
    counted = Watchers()
    with ExitStack() as stack:
        for number in range(watchers.MAX_WATCHERS):
            stack.enter_context(counted.track_stream("routers", f"client {number}"))
        with pytest.raises(Exhausted):
            stack.enter_context(counted.track_stream("routers", "another"))
        stack.enter_context(counted.track_stream("jobs", "another"))
    assert not counted._open, "nothing is kept of clients that have none"
