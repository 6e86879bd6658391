"""Alarms about a version that serves, on answers of known figures."""

import json
import math
import random

import pytest

from calibrator_service.judge.trial import BLOCK_S
from calibrator_service.judge.watch import BLOCK_ANSWERS, MAX_GROUPS, MAX_OPEN, PAST_BLOCKS, Alarm, Watch
from shared.served import NOTHING, Served

WORKER = "a" * 8


def block(pace: float, speed_up: float, seed: int, noise: float = 0.1) -> Served:
    """Answers with so many tokens per pass, which full depth would have taken `speed_up` times as long for."""
    generator, total = random.Random(seed), NOTHING
    for _ in range(BLOCK_ANSWERS):
        passes = 100 / (pace * math.exp(generator.gauss(0.0, noise)))
        full_s = speed_up * math.exp(generator.gauss(0.0, noise))
        total = total.plus(Served(1, 100, passes, 100, 1.0, full_s, 100.0, 0.0))
    return total


# Soon after what `fed` fed.
NOW_S = 1300.0


def fed(watch: Watch, count: int, pace: float, speed_up: float, *, workers=(WORKER,), load=0, first=0) -> int | None:
    """The number of blocks until an alarm; None: there is none."""
    for number in range(count):
        now_s = first + number
        watch.observe(workers[number % len(workers)], load, block(pace, speed_up, first + number), now_s)
        if watch.alarm(now_s) is not None:
            return number + 1
    return None


def test_what_goes_on_as_it_was_raises_no_alarm():
    assert fed(Watch(7), 2000, 2.0, 1.4) is None


@pytest.mark.parametrize("speed_up", [0.95, 0.8, 0.5])
def test_a_version_that_is_slower_than_full_depth(speed_up):
    watch = Watch(7)
    assert fed(watch, 300, 1.2, 1.3) is None
    found = fed(watch, 300, 1.2, speed_up, first=1000)
    assert found is not None
    assert watch.alarm(NOW_S) is Alarm.SLOWER_THAN_FULL


def test_full_depth_of_which_nothing_is_known_raises_no_alarm():
    watch = Watch(7)
    for seed in range(200):
        watch.observe(WORKER, 0, block(2.0, 1.0, seed)._replace(full_seconds=0.0), seed)
    assert watch.alarm(NOW_S) is None


def test_a_version_whose_drafts_are_accepted_less_often_than_they_were():
    watch = Watch(7)
    assert fed(watch, 200, 2.0, 1.4) is None
    assert fed(watch, 200, 1.5, 1.1, first=1000) is not None
    assert watch.alarm(NOW_S) is Alarm.LOST_ACCEPTANCE
    assert "0.5" in watch.figures()
    watch.begin_again()
    assert watch.alarm(NOW_S) is None
    assert fed(watch, 200, 1.5, 1.1, first=2000) is None  # the present is its past now


def test_another_load_has_a_past_of_its_own():
    watch = Watch(7)
    assert fed(watch, 100, 2.0, 1.4) is None
    assert fed(watch, 100, 1.4, 1.1, load=3, first=1000) is None


def test_one_worker_of_several_raises_no_alarm():
    watch = Watch(7)
    assert fed(watch, 100, 2.0, 1.4, workers=("a" * 8, "b" * 8, "c" * 8)) is None
    assert fed(watch, 300, 1.0, 0.1, workers=("a" * 8,), first=200) is None
    assert fed(watch, 300, 1.0, 0.1, workers=("a" * 8, "b" * 8), first=600) is not None


def test_one_worker_raises_no_alarm_before_the_others_have_said_enough():
    watch = Watch(7)
    for number in range(200):
        watch.observe("b" * 8, 0, block(2.0, 1.4, number)._replace(num_requests=0.01), number)
        watch.observe("a" * 8, 0, block(2.0, 0.01, number), number)
        assert watch.alarm(number) is None
    again = Watch.from_record(watch.to_record(), 1000.0)
    assert again.alarm(1000.0) is None


def test_a_worker_raises_an_alarm_alone_once_the_others_are_gone():
    """As after its restart, by which it became another one."""
    watch = Watch(7)
    assert fed(watch, 10, 2.0, 1.4) is None
    assert fed(watch, 300, 2.0, 0.5, workers=("b" * 8,), first=10) is None
    assert fed(watch, 1, 2.0, 0.5, workers=("b" * 8,), first=20 + int(BLOCK_S)) == 1


def test_what_is_kept_goes_on_as_if_nothing_had_been():
    watch = Watch(7)
    assert fed(watch, PAST_BLOCKS + 30, 2.0, 1.0) is None
    record = json.loads(json.dumps(watch.to_record()))
    assert Watch.from_record(record, 0.0).to_record() == watch.to_record()
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        Watch.from_record({**record, "logs": {"a": {"slower_than_full": [math.inf] * 16}}}, 0.0)


def test_workers_without_number_take_bounded_memory():
    watch = Watch(7)
    for number in range(2 * MAX_OPEN):
        watch.observe(f"{number:08}", 0, block(2.0, 1.4, number), number)
        watch.observe(f"{number:08}", 0, block(2.0, 1.4, number)._replace(num_requests=1), number)
    assert len(watch._open) <= MAX_OPEN
    assert max(len(watch.logs), len(watch._seen_s)) <= MAX_GROUPS
