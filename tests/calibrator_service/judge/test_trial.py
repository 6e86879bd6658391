"""Decisions of a trial on answers of known speed."""

import json
import math
import random

import pytest

from calibrator_service.judge.trial import (
    BLOCK_S,
    LEAST_BLOCKS,
    MAX_GROUPS,
    MAX_OPEN,
    MOST_TOKENS,
    SILENT_S,
    Outcome,
    Trial,
)
from shared.served import NOTHING, Served
from tests.tiers import tiered

OLD, NEW = 7, 8


def answers(count: int, seconds_per_token: float, *, noise: float = 0.0, seed: int = 0, tokens: int = 100) -> Served:
    generator, total = random.Random(seed), NOTHING
    for _ in range(count):
        took = seconds_per_token * math.exp(generator.gauss(0.0, noise))
        total = total.plus(Served(1, tokens, tokens / 2, tokens, tokens * took, 0.0, tokens, tokens * math.log(took)))
    return total


def run(speed_up: float, *, workers=("a" * 8,), noise=0.3, blocks=600, seed=0, factors=(1.0,), poisoned=None) -> tuple:
    """Feeds blocks until there is a decision. `factors`: of the seconds of both versions, block after block. Returns
    the outcome, the trial and the shares that it had."""
    trial, share, shares = Trial(OLD, NEW, 0.0), 50, [50]
    for number in range(blocks):
        worker, factor = workers[number % len(workers)], 0.01 * factors[number % len(factors)]
        faster = poisoned[1] if poisoned is not None and worker == poisoned[0] else speed_up
        trial.observe(worker, 0, OLD, answers(12, factor, noise=noise, seed=2 * number + 10_000 * seed), number)
        trial.observe(
            worker, 0, NEW, answers(8, factor / faster, noise=noise, seed=2 * number + 10_000 * seed + 1), number
        )
        verdict = trial.verdict(share, number)
        if verdict is None:
            continue
        if verdict.outcome is not Outcome.GROW:
            return verdict.outcome, trial, shares
        share = verdict.share_per_mille
        shares.append(share)
    return None, trial, shares


@pytest.mark.parametrize(
    ("speed_up", "outcome"), [(1.15, Outcome.PROMOTE), (0.9, Outcome.ROLL_BACK), (1.0, Outcome.NO_DIFFERENCE)]
)
def test_it_finds_what_was_planted(speed_up, outcome):
    found = [run(speed_up, seed=seed)[0] for seed in range(12)]
    assert found.count(outcome) >= 11


def test_a_faster_version_grows_in_steps_before_it_is_promoted():
    outcome, trial, shares = run(1.3)
    assert outcome is Outcome.PROMOTE
    assert shares == [50, 200, 500][: len(shares)]
    assert len(shares) > 1
    assert trial.num_blocks >= LEAST_BLOCKS
    assert trial.speed_up == pytest.approx(1.3, rel=0.15)


def test_a_slower_version_does_not_grow():
    outcome, _, shares = run(0.6)
    assert (outcome, shares) == (Outcome.ROLL_BACK, [50])


def test_hours_and_workers_of_other_speeds_are_no_difference():
    """Each block is as slow as its hour, and the hours differ by a factor of ten."""
    workers = ("a" * 8, "b" * 8)
    assert run(1.0, factors=(0.3, 1.0, 3.0), workers=workers, noise=0.1)[0] is Outcome.NO_DIFFERENCE
    assert run(1.2, factors=(0.3, 1.0, 3.0), workers=workers, noise=0.1)[0] is Outcome.PROMOTE


def test_loads_are_not_mixed():
    """The canary has its answers under one load and the other version under another: there is nothing to compare."""
    trial = Trial(OLD, NEW, 0.0)
    for number in range(100):
        trial.observe("a" * 8, 0, OLD, answers(8, 0.01), number)
        trial.observe("a" * 8, 3, NEW, answers(8, 0.001), number)
    assert trial.num_blocks == 0
    assert trial.verdict(50, 100.0) is None


def test_answers_of_other_hours_are_not_compared():
    trial = Trial(OLD, NEW, 0.0)
    trial.observe("a" * 8, 0, OLD, answers(50, 0.01), 0.0)
    trial.observe("a" * 8, 0, NEW, answers(50, 0.001), BLOCK_S + 1)
    assert trial.num_blocks == 0
    trial.observe("a" * 8, 0, OLD, answers(50, 0.01), BLOCK_S + 2)
    assert trial.num_blocks == 1


def test_where_few_ask_a_block_closes_with_what_it_has():
    trial = Trial(OLD, NEW, 0.0)
    trial.observe("a" * 8, 0, OLD, answers(5, 0.01), 0.0)
    trial.observe("a" * 8, 0, NEW, answers(1, 0.005), 100.0)
    assert trial.num_blocks == 0
    trial.observe("a" * 8, 0, OLD, answers(1, 0.01), BLOCK_S + 1)
    assert trial.num_blocks == 1
    assert trial.speed_up == pytest.approx(2.0)


@pytest.mark.parametrize("letters", tiered(["ab", "abcd"], {"abcd"}))
@pytest.mark.parametrize("poison", tiered([0.01, 0.1, 10.0, 100.0], {0.01, 100.0}))
@pytest.mark.parametrize("speed_up", tiered([1.0, 1.15, 0.9], {1.0, 0.9}))
def test_one_poisoned_worker_of_several_makes_no_wrong_decision(speed_up, poison, letters):
    workers = tuple(letter * 8 for letter in letters)
    wrong = Outcome.PROMOTE if speed_up <= 1.0 else Outcome.ROLL_BACK
    wrong_too = Outcome.ROLL_BACK if speed_up >= 1.0 else Outcome.PROMOTE
    for seed in range(4):
        outcome = run(speed_up, workers=workers, poisoned=("a" * 8, poison), seed=seed)[0]
        assert outcome not in (wrong, wrong_too)


@pytest.mark.parametrize("last_compared_s", [None, 0.0])
@pytest.mark.parametrize("poison", [0.01, 100.0])
def test_one_that_says_more_than_the_others_does_not_decide_before_them(poison, last_compared_s):
    """The others answer too seldom for a comparison: never yet, or not for longer than a block lasts."""
    trial, others = Trial(OLD, NEW, 0.0), ("b" * 8, "c" * 8)
    for worker in others if last_compared_s is not None else ():
        trial.observe(worker, 0, OLD, answers(8, 0.01), last_compared_s)
        trial.observe(worker, 0, NEW, answers(8, 0.01), last_compared_s)
    for number in range(40):
        now_s = 1.1 * BLOCK_S + 10.0 * number
        for load in range(8):
            trial.observe("a" * 8, load, OLD, answers(8, 0.01), now_s)
            trial.observe("a" * 8, load, NEW, answers(8, 0.01 / poison, tokens=8), now_s)
        for worker in others:
            trial.observe(worker, 0, OLD, answers(1, 0.01), now_s)
        assert trial.verdict(200, now_s) is None
    for worker in others:  # and these find it to be as fast
        for number in range(200):
            trial.observe(worker, 0, OLD, answers(8, 0.01, noise=0.1, seed=number), now_s)
            trial.observe(worker, 0, NEW, answers(8, 0.01, noise=0.1, seed=-number), now_s)
            if (verdict := trial.verdict(200, now_s)) is not None:
                assert verdict.outcome in (Outcome.GROW, Outcome.NO_DIFFERENCE)


def test_no_worker_hides_from_the_share_what_the_others_find():
    workers = tuple(letter * 8 for letter in "abcd")
    _, _, shares = run(0.8, workers=workers, poisoned=("a" * 8, 3.0))
    assert shares == [50]


def test_a_worker_decides_alone_once_the_others_are_gone():
    """Those that were restarted count as others, which are silent now."""
    gone = tuple(letter * 8 for letter in "bcd")
    outcome, trial, _ = run(1.2, workers=gone, blocks=6)
    assert outcome is None
    now_s = 6.0
    while (verdict := trial.verdict(200, now_s)) is None or verdict.outcome is Outcome.GROW:
        now_s += 30.0
        trial.observe("a" * 8, 0, OLD, answers(12, 0.01, noise=0.3, seed=int(now_s)), now_s)
        trial.observe("a" * 8, 0, NEW, answers(8, 0.01 / 1.2, noise=0.3, seed=int(now_s) + 1), now_s)
    assert verdict.outcome is Outcome.PROMOTE
    assert now_s > BLOCK_S


def test_versions_that_nobody_asked_about_count_nowhere():
    trial = Trial(OLD, NEW, 0.0)
    trial.observe("a" * 8, 0, 9, answers(10, 0.001), 0.0)
    trial.observe("a" * 8, 0, 0, answers(10, 0.001), 0.0)
    assert trial.num_blocks == 0
    assert not trial._open


def test_a_canary_without_answers_is_given_up_once_some_were_expected():
    trial = Trial(OLD, NEW, 0.0)
    assert trial.verdict(50, 10 * SILENT_S) is None  # nobody asks for anything
    trial.observe("a" * 8, 0, OLD, answers(200, 0.01), 10 * SILENT_S)
    assert trial.verdict(50, 10 * SILENT_S) is None  # ten were expected
    trial.observe("a" * 8, 0, OLD, answers(200, 0.01), 10 * SILENT_S)
    assert trial.verdict(50, 10 * SILENT_S).outcome is Outcome.SILENT
    trial.observe("a" * 8, 0, NEW, answers(1, 0.01), 10 * SILENT_S)
    assert trial.verdict(50, 10 * SILENT_S) is None


def test_it_ends_after_so_many_tokens():
    trial, number = Trial(OLD, NEW, 0.0), 0
    while (verdict := trial.verdict(500, 0.0)) is None:
        # So unsteady that neither a difference nor its absence can be shown.
        factor = 0.01 * math.exp(0.4 * (-1) ** number)
        trial.observe("a" * 8, 0, OLD, answers(8, 0.01), number)
        trial.observe("a" * 8, 0, NEW, answers(8, factor, tokens=1000), number)
        number += 1
    assert verdict.outcome is Outcome.NO_DIFFERENCE
    assert MOST_TOKENS <= trial.served.num_tokens < MOST_TOKENS + 10_000


def test_what_is_kept_goes_on_as_if_nothing_had_been():
    outcome, trial, _ = run(1.1, blocks=15)
    assert outcome is None
    again = Trial.from_record(json.loads(json.dumps(trial.to_record(20.0))), 500.0)
    for test in ("faster", "slower", "not_faster", "not_slower"):
        assert again.evidence(test, 500.0) == pytest.approx(trial.evidence(test, 20.0))
    assert again.figures() == trial.figures()
    assert again.to_record(500.0) == trial.to_record(20.0)


@pytest.mark.parametrize("harm", [{"groups": {"a": {}}}, {"served": []}, {"num_blocks": "many"}, {"groups": 3}])
def test_records_of_another_build_are_refused(harm):
    record = {**run(1.1, blocks=3)[1].to_record(20.0), **harm}
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        Trial.from_record(record, 0.0)


def test_workers_without_number_take_bounded_memory():
    trial = Trial(OLD, NEW, 0.0)
    for number in range(2 * MAX_OPEN):
        worker = f"{number:08}"
        trial.observe(worker, 0, OLD, answers(8, 0.01), number)
        if number % 2:
            trial.observe(worker, 0, NEW, answers(8, 0.01), number)
    assert len(trial._open) <= MAX_OPEN
    assert len(trial.groups) == MAX_GROUPS
    assert sum(group.blocks_at_share for group in trial.groups.values()) == trial.num_blocks == MAX_OPEN
