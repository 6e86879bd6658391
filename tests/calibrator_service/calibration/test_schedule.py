"""When phases end, by what a machine measured."""

import math

import pytest

from calibrator_service.calibration.schedule import (
    MAX_SOLVING_SHARE,
    MIN_RISK_PROMPTS,
    RISK_SHARE,
    TRAINING_SHARE,
    Schedule,
)

ANSWER_TOKENS = 128


def ends(schedule: Schedule) -> list[float]:
    return [schedule.collecting, schedule.risk_text, schedule.heads, schedule.routers]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("solving_s", [0.0, 20.0, 10_000.0])
@pytest.mark.parametrize("tokens_per_s", [0.0, 5.0, 500.0, 1e9])
@pytest.mark.parametrize("num_prompts", [0, 1, 300])
@pytest.mark.parametrize("budget_s", [5.0, 150.0, 30_000.0])
def test_phases_follow_each_other_and_text_has_time(trains, solving_s, tokens_per_s, num_prompts, budget_s):
    schedule = Schedule(budget_s, trains=trains)
    schedule.expect_solving(lambda _: solving_s)
    schedule.expect_risk(num_prompts, ANSWER_TOKENS, tokens_per_s)
    assert [0.2, *ends(schedule), 1.0] == sorted([0.2, *ends(schedule), 1.0])
    # Certifying reads the answers again, which takes as long as writing them.
    assert 1.0 - schedule.routers >= schedule.risk_text - schedule.collecting
    if trains:
        assert schedule.heads - schedule.risk_text >= TRAINING_SHARE - 1e-9


def test_a_machine_that_cannot_write_enough_answers_certifies_nothing():
    """Its text gets the time. At twice the speed there would be answers enough."""
    needed = MIN_RISK_PROMPTS * ANSWER_TOKENS / (RISK_SHARE * 150)
    slow, fast = Schedule(150.0, trains=False), Schedule(150.0, trains=False)
    slow.expect_risk(300, ANSWER_TOKENS, needed)
    fast.expect_risk(300, ANSWER_TOKENS, 2 * needed)
    assert (slow.certifies, fast.certifies) == (False, True)
    assert slow.collecting == slow.risk_text > fast.collecting + RISK_SHARE


def test_few_prompts_that_were_given_are_enough():
    schedule = Schedule(150.0, trains=False)
    schedule.expect_risk(20, ANSWER_TOKENS, 300.0)
    assert schedule.certifies


def test_a_long_calibration_takes_no_more_time_for_answers_than_they_need():
    schedule = Schedule(36_000.0, trains=False)
    before = schedule.collecting
    schedule.expect_risk(300, ANSWER_TOKENS, 500.0)
    assert schedule.certifies
    assert schedule.collecting > before + 1.9 * RISK_SHARE * 0.9


def test_solving_takes_its_time_from_the_text():
    schedule = Schedule(150.0, trains=False)
    before = ends(schedule)
    schedule.expect_solving(lambda _: 15.0)
    assert ends(schedule) == [*(pytest.approx(end - 0.1) for end in before[:2]), *before[2:]]
    schedule.expect_solving(lambda _: 1500.0)
    assert schedule.risk_text == pytest.approx(before[1] - MAX_SOLVING_SHARE)


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
    schedule.expect_risk(300, ANSWER_TOKENS, 1e-3)
    assert ends(schedule) == before
    assert schedule.certifies
