"""The judge on a real registry, step by step: what it does to aliases, and what it leaves alone."""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from calibrator_service.judge import judge as module
from calibrator_service.judge.judge import ACTOR, Judge
from calibrator_service.judge.orders import Order
from calibrator_service.metrics import CalibratorMetrics
from shared.errors import InvalidInput, NeapError, NotFound, PreconditionFailed, Unavailable
from shared.registry import lease
from shared.registry.base import AliasChange, Canary
from shared.registry.factory import open_registry
from shared.registry.registry import Registry
from shared.registry.speeds import kept_speeds
from shared.served import NOTHING, Served, ServedKey
from tests.manifests import real_manifest
from tests.registry_damage import damaged

MODEL, STABLE = "tiny", "stable"
MAX_STEPS = 400


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(module, "elapsed_s", moved)
    monkeypatch.setattr(lease, "elapsed_s", moved)
    return moved


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    opened = open_registry(str(tmp_path / "registry"))
    for number in (1, 2, 3):
        opened.publish(
            MODEL,
            {**real_manifest(), "number": number},
            {"x": b"weights"},
            request_id=str(number),
            aliases=[STABLE] if number == 1 else [],
        )
    yield opened
    opened.close()


class Worker:
    """Reports answers by seconds per token of each version, tokens per pass, and how much longer full depth takes."""

    def __init__(self, judge: Judge, name: str = "a" * 8) -> None:
        self.judge, self.name, self.sequence = judge, name, 0
        self.sums: dict[ServedKey, Served] = {}
        self.suspended: list[str] = []

    def serve(self, speeds: dict[int, float], *, pace: float = 2.0, full: float = 1.4, alias: str = STABLE) -> None:
        for version, seconds_per_token in speeds.items():
            key = ServedKey(alias, version, 0)
            for _ in range(8):
                took = seconds_per_token * math.exp(random.Random(f"{version} {self.sequence}").gauss(0.0, 0.1))
                one = Served(1, 100, 100 / pace, 90, 100 * took, 100 * took * full, 100, 100 * math.log(took))
                self.sums[key] = self.sums.get(key, NOTHING).plus(one)
        self.sequence += 1
        _, self.suspended = self.judge.report("one", self.name, MODEL, self.sequence, self.sums)


def last(registry: Registry) -> AliasChange:
    return registry.last_changes(MODEL)[STABLE]


@pytest.fixture
def start(registry: Registry, clock: Clock) -> Callable[..., tuple[Judge, Worker]]:
    """A judge that acts, as a service that starts would have it, and a worker that has begun to report."""

    def start(name: str = "a" * 8, on: Registry = registry) -> tuple[Judge, Worker]:
        judge = Judge(on, [MODEL], metrics=CalibratorMetrics())
        judge._step()
        clock.now_s += 31.0
        judge._step()
        worker = Worker(judge, name)
        worker.serve({})
        return judge, worker

    return start


def shares(registry: Registry) -> list[int]:
    """Those that the canary of the alias had, one after the other."""
    return [change.canary.share_per_mille for change in registry.alias_history(MODEL, STABLE)[::-1] if change.canary]


def run(judge: Judge, worker: Worker, clock: Clock, until: Callable[[], bool], speeds: dict[int, float], **more) -> int:
    for step in range(MAX_STEPS):
        if until():
            return step
        worker.serve(speeds, **more)
        clock.now_s += 5.0
        judge._step()
    raise AssertionError("no end")


def test_a_faster_version_grows_step_by_step_and_is_promoted(start, registry, clock):
    judge, worker = start()
    judge.begin(MODEL, STABLE, 2, "asked by me")
    run(judge, worker, clock, lambda: last(registry).to_version == 2, {1: 0.012, 2: 0.01})
    history = registry.alias_history(MODEL, STABLE)[::-1]
    assert shares(registry) == [50, 200, 500]
    assert {change.actor for change in history[1:]} == {ACTOR}
    assert "asked by me" in history[1].reason
    assert history[-1].canary is None
    assert history[-1].reason.startswith("promote: 1.2")
    assert "accepted drafts per pass" in history[-1].reason
    assert judge.status(MODEL).aliases[0].state == "watched"


def test_a_slower_version_is_rolled_back_from_its_first_share(start, registry, clock):
    judge, worker = start()
    judge.begin(MODEL, STABLE, 2, "")
    run(judge, worker, clock, lambda: last(registry).canary is None, {1: 0.01, 2: 0.014})
    assert last(registry).to_version == 1
    assert last(registry).reason.startswith("roll_back: 0.")
    assert shares(registry) == [50]


def test_an_equal_version_ends_without_difference(start, registry, clock):
    judge, worker = start()
    judge.begin(MODEL, STABLE, 2, "")
    run(judge, worker, clock, lambda: last(registry).canary is None, {1: 0.01, 2: 0.01})
    assert last(registry).to_version == 1
    assert last(registry).reason.startswith("no_difference: ")


def test_requests_that_name_a_version_or_another_alias_do_not_count(start, registry, clock):
    judge, worker = start()
    judge.begin(MODEL, STABLE, 2, "")
    for alias in ("", "other"):
        for _ in range(50):
            worker.serve({1: 0.01, 2: 0.001}, alias=alias)
            judge._step()
    assert last(registry).canary == Canary(2, 50)
    assert judge.status(MODEL).aliases[0].figures == "no comparison yet"


@pytest.mark.parametrize("change", ["canary", "promote", "abort", "rollback", "set"])
def test_an_operator_who_changes_the_alias_ends_the_trial(start, registry, clock, change):
    judge, worker = start()
    judge.begin(MODEL, STABLE, 2, "")
    judge._step()
    {
        "canary": lambda: registry.set_canary(MODEL, STABLE, Canary(2, 300), actor="me"),
        "promote": lambda: registry.promote_canary(MODEL, STABLE, actor="me"),
        "abort": lambda: registry.set_canary(MODEL, STABLE, None, actor="me"),
        "rollback": lambda: registry.rollback_alias(MODEL, STABLE, actor="me"),
        "set": lambda: registry.set_alias(MODEL, STABLE, 3, actor="me"),
    }[change]()
    mine = last(registry)
    for _ in range(60):
        worker.serve({1: 0.012, 2: 0.005, 3: 0.01})
        clock.now_s += 5.0
        judge._step()
    assert last(registry) == mine


def test_a_held_alias_stays_as_it_is_until_it_is_released(start, registry, clock):
    judge, worker = start()
    judge.begin(MODEL, STABLE, 2, "")
    judge.order(Order(MODEL, "hold", STABLE))
    for _ in range(60):
        worker.serve({1: 0.012, 2: 0.005})
        clock.now_s += 5.0
        judge._step()
    assert last(registry).canary == Canary(2, 50)
    assert judge.status(MODEL).aliases[0].state == "on trial, held"
    judge.order(Order(MODEL, "release", STABLE))
    run(judge, worker, clock, lambda: last(registry).to_version == 2, {1: 0.012, 2: 0.005})


def test_a_forbidden_version_is_not_tried(start, registry, clock):
    judge, _ = start()
    judge.begin(MODEL, STABLE, 2, "")
    judge.order(Order(MODEL, "forbid", version=2))
    judge._step()
    assert last(registry).canary is None
    with pytest.raises(PreconditionFailed) as raised:
        judge.begin(MODEL, STABLE, 2, "")
    assert raised.value.reason == "FORBIDDEN_VERSION"
    assert judge.status(MODEL).forbidden == [2]
    judge.order(Order(MODEL, "allow", version=2))
    assert judge.begin(MODEL, STABLE, 2, "").canary == Canary(2, 50)


def test_the_first_share_is_what_the_settings_say(registry, clock):
    judge = Judge(registry, [MODEL], metrics=CalibratorMetrics(), first_share=0.333)
    assert judge.begin(MODEL, STABLE, 2, "").canary == Canary(2, 333)


def test_trials_that_cannot_begin(start, registry):
    judge, _ = start()
    with pytest.raises(NotFound):
        judge.begin(MODEL, "absent", 2, "")
    with pytest.raises(NotFound):
        judge.begin(MODEL, STABLE, 9, "")
    with pytest.raises(InvalidInput):
        judge.begin(MODEL, STABLE, 1, "")
    first = judge.begin(MODEL, STABLE, 2, "")
    assert judge.begin(MODEL, STABLE, 2, "again") == first
    with pytest.raises(PreconditionFailed) as raised:
        judge.begin(MODEL, STABLE, 3, "")
    assert raised.value.reason == "CANARY_RUNS"


@pytest.mark.parametrize(
    "order", [{"action": ""}, {"action": "hold"}, {"action": "forbid"}, {"action": "forbid", "version": -1}]
)
def test_orders_that_mean_nothing_are_refused(order):
    with pytest.raises(InvalidInput):
        Order(**{"model_id": MODEL, **order})


def test_a_version_that_can_no_longer_be_read_is_taken_back(start, registry, clock, tmp_path):
    judge, _ = start()
    judge.begin(MODEL, STABLE, 2, "")
    judge._step()
    digest = registry.get(MODEL, 2).manifest_digest.partition(":")[2]
    manifest = tmp_path / "registry" / "manifests" / "sha256" / digest[:2] / digest
    manifest.write_bytes(damaged(manifest.read_bytes(), "truncate"))
    again = open_registry(str(tmp_path / "registry"))  # which has not read it before
    judge.stop()
    judge = Judge(again, [MODEL], metrics=CalibratorMetrics())
    judge._step()
    judge._step()
    again.close()
    assert last(registry).canary is None
    assert "cannot be read" in last(registry).reason


@pytest.mark.parametrize("at", ["keep_note", "set_canary", "promote_canary"])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_service_that_dies_at_any_step_is_followed_by_one_that_goes_on(
    start, registry, clock, monkeypatch, at, is_before
):
    """Each judge dies before or after its first step of that kind, until one gets through."""

    class DiedError(BaseException):
        pass

    real, deaths = getattr(Registry, at), []

    def dying(self, *arguments, **options):
        if is_before and len(deaths) < 3:
            raise DiedError
        result = real(self, *arguments, **options)
        if len(deaths) < 3:
            raise DiedError
        return result

    judge, worker = start("worker00")
    judge.begin(MODEL, STABLE, 2, "")
    monkeypatch.setattr(Registry, at, dying)
    for number in range(1, 20):
        try:
            run(judge, worker, clock, lambda: last(registry).to_version == 2, {1: 0.013, 2: 0.01})
            break
        except DiedError:
            deaths.append(number)
            while True:  # also as it begins
                with suppress(DiedError):
                    judge, worker = start(f"worker{number:02}")
                    break
                deaths.append(number)
    assert deaths
    history = registry.alias_history(MODEL, STABLE)[::-1]
    assert shares(registry) == [50, 200, 500][: len(shares(registry))]  # each once
    assert history[-1].to_version == 2


def test_of_two_calibrators_one_acts_and_the_other_goes_on_where_it_was(start, registry, clock, tmp_path):
    judge, worker = start()
    other = Judge(open_registry(str(tmp_path / "registry")), [MODEL], metrics=CalibratorMetrics())
    other._step()
    with pytest.raises(Unavailable) as raised:
        Worker(other).serve({1: 0.01})
    assert raised.value.reason == "NOT_ACTING"
    assert not other.status(MODEL).is_acting
    other.begin(MODEL, STABLE, 2, "by the one that does not act")
    for _ in range(5):
        worker.serve({1: 0.012, 2: 0.01})
        clock.now_s += 5.0
        judge._step()
        other._step()
    before = judge.status(MODEL).aliases[0]
    assert "5 comparisons" in before.figures or "4 comparisons" in before.figures
    judge.stop()
    other._step()
    assert other.status(MODEL).is_acting
    assert other.status(MODEL).aliases[0].figures == before.figures
    judge._step()
    with pytest.raises(Unavailable):
        worker.serve({1: 0.01})
    worker.judge = other
    run(other, worker, clock, lambda: last(registry).to_version == 2, {1: 0.012, 2: 0.01})


def test_a_judge_whose_lease_has_passed_does_nothing(start, registry, clock, monkeypatch):
    judge, worker = start()
    judge.begin(MODEL, STABLE, 2, "")
    monkeypatch.setattr(registry._store, "create", lambda *_: _unavailable())
    for _ in range(10):
        try:
            worker.serve({1: 0.02, 2: 0.005})
            clock.now_s += 5.0
            judge._step()
        except NeapError:
            continue
    assert not judge.status(MODEL).is_acting
    assert last(registry).canary == Canary(2, 50)


def _unavailable() -> bool:
    raise Unavailable("the store is away")


def test_speeds_over_time_are_kept_and_go_on(start, registry, clock):
    for name in ("a" * 8, "b" * 8):
        judge, worker = start(name)
        worker.serve({1: 0.02, 2: 0.01})
        worker.serve({1: 0.02}, alias="absent")
        assert list(kept_speeds(registry, MODEL, STABLE).points()) == [] or name == "b" * 8
        judge.stop()
    speeds = kept_speeds(registry, MODEL, STABLE)
    tokens = {version: sum(n for (_, its), (n, _) in speeds.sums.items() if its == version) for version in (1, 2)}
    assert tokens == {1: 1600, 2: 1600}
    assert {(version, round(speed / 10)) for version, _, speed in speeds.points()} == {(1, 5), (2, 10)}
    assert list(kept_speeds(registry, MODEL, "absent").points()) == []


def test_evidence_that_cannot_be_read_is_gathered_anew(start, registry, clock, tmp_path):
    judge, worker = start()
    judge.begin(MODEL, STABLE, 2, "")
    run(judge, worker, clock, lambda: worker.sequence > 6, {1: 0.012, 2: 0.01})
    judge.stop()
    for spoiled in ({"trials": 3}, {"trials": [[1, 2, {}]], "watches": [], "suspended": []}):
        registry.keep_note(ACTOR, spoiled)
        again = Judge(registry, [MODEL], metrics=CalibratorMetrics())
        again._step()
        assert again.status(MODEL).aliases[0].figures == "no comparison yet"
        again.stop()


def test_a_version_slower_than_full_depth_gives_way_to_the_one_before(start, registry, clock):
    judge, worker = start()
    registry.set_alias(MODEL, STABLE, 2, actor="me")
    run(judge, worker, clock, lambda: last(registry).to_version == 1, {2: 0.01}, full=0.8)
    assert last(registry).actor == ACTOR
    assert last(registry).reason.startswith("slower_than_full: ")
    assert judge.status(MODEL).forbidden == [2]
    assert worker.suspended == []


def test_without_one_before_its_router_is_suspended_until_the_alias_moves(start, registry, clock):
    judge, worker = start()
    run(judge, worker, clock, lambda: worker.suspended == [STABLE], {1: 0.01}, full=0.8)
    assert judge.status(MODEL).aliases[0].state == "suspended"
    judge.stop()
    again, worker = start("b" * 8)
    worker.serve({})
    assert worker.suspended == [STABLE]
    registry.set_alias(MODEL, STABLE, 3, actor="me")
    again._step()
    worker.serve({})
    assert worker.suspended == []


def test_a_version_that_lost_acceptance_is_compared_with_the_one_before(start, registry, clock):
    judge, worker = start()
    registry.set_alias(MODEL, STABLE, 2, actor="me")
    run(judge, worker, clock, lambda: worker.sequence > 60, {2: 0.01}, pace=2.2)
    run(judge, worker, clock, lambda: last(registry).canary == Canary(1, 50), {2: 0.012}, pace=1.5)
    assert "lost_acceptance" in last(registry).reason
    run(judge, worker, clock, lambda: last(registry).canary is None, {2: 0.012, 1: 0.012}, pace=1.5)
    assert last(registry).to_version == 2  # the other one is no faster there
