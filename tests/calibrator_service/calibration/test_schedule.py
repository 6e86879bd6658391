"""When phases end, by what a machine measured."""

import math

import pytest

from calibrator_service.calibration.run import (
    MAX_SOLVING_SHARE,
    RELAXED_SHARE,
    TRAINING_SHARE,
    Schedule,
)


def ends(schedule: Schedule) -> list[float]:
    return [schedule.collecting, schedule.heads, schedule.confidence]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("solving_s", [0.0, 20.0, 10_000.0])
@pytest.mark.parametrize("budget_s", [5.0, 150.0, 30_000.0])
def test_phases_follow_each_other_and_text_has_time(trains, solving_s, budget_s):
    schedule = Schedule(budget_s, trains=trains)
    schedule.expect_solving(lambda _: solving_s)
    assert [0.2, *ends(schedule), 1.0] == sorted([0.2, *ends(schedule), 1.0])
    assert 1.0 - schedule.confidence > RELAXED_SHARE
    if trains:
        assert schedule.heads - schedule.collecting >= TRAINING_SHARE - 1e-9


def test_solving_takes_its_time_from_the_text():
    schedule = Schedule(150.0, trains=False)
    before = ends(schedule)
    schedule.expect_solving(lambda _: 15.0)
    assert ends(schedule) == [pytest.approx(before[0] - 0.1), *before[1:]]
    schedule.expect_solving(lambda _: 1500.0)
    assert schedule.collecting == pytest.approx(before[0] - MAX_SOLVING_SHARE)


def test_fewer_positions_than_expected_leave_time_for_text():
    schedule = Schedule(150.0, trains=False)
    schedule.expect_solving(lambda count: 15.0 if count > 1000 else 0.0)
    late = schedule.collecting
    schedule.expect_positions(1000)
    assert schedule.collecting == pytest.approx(late + 0.1)
    schedule.expect_positions(1001)
    assert schedule.collecting == late


def test_without_a_budget_nothing_is_left_out():
    schedule = Schedule(math.inf, trains=True)
    before = ends(schedule)
    schedule.expect_solving(lambda _: 1e6)
    assert ends(schedule) == before
