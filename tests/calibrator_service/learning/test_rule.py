"""When a pool is due, whatever the clocks say."""

import pytest

from calibrator_service.learning.rule import MAX_BACKOFF, LearningRule, PoolState
from shared.registry.store import StoredObject
from shared.traffic.traffic import Batch

RULE = LearningRule(min_tokens=100, min_interval_s=60.0)


def batch(written_s: float, num_tokens: int) -> Batch:
    return Batch(StoredObject("traffic/m/p/x", 1, written_s), 1, num_tokens, "ab")


def test_what_was_written_since_is_new():
    batches = [batch(10.0, 1), batch(20.0, 2), batch(30.0, 4)]
    assert [PoolState(counted_s=s).new_tokens(batches) for s in (0.0, 9.0, 10.0, 25.0, 30.0)] == [7, 7, 6, 4, 0]
    assert PoolState(counted_s=5.0).new_tokens([]) == 0


def test_after_the_stores_clock_was_put_back_all_counts_once():
    state = PoolState(counted_s=1000.0)
    batches = [batch(10.0, 1), batch(20.0, 2)]
    assert state.new_tokens(batches) == 3
    assert PoolState(counted_s=20.0).new_tokens(batches) == 0


def test_it_is_due_with_enough_tokens_and_after_its_interval():
    state = PoolState(began_s=1000.0)
    assert not state.is_due(RULE, 99, 2000.0)
    assert state.is_due(RULE, 100, 2000.0)
    assert not state.is_due(RULE, 100, 1059.0)
    assert state.is_due(RULE, 100, 1060.0)
    assert not state.is_due(LearningRule(0, 0.0), 0, 2000.0)


def test_where_acceptance_was_lost_fewer_tokens_do():
    state = PoolState(began_s=1000.0)
    assert [state.is_due(RULE, n, 2000.0, has_lost=True) for n in (9, 10)] == [False, True]
    assert not state.is_due(RULE, 10, 1059.0, has_lost=True)


def test_a_clock_that_was_put_back_does_not_stop_it():
    assert PoolState(began_s=1e9).is_due(RULE, 100, 10.0)


@pytest.mark.parametrize(("num_failed", "factor"), [(1, 2), (3, 8), (6, MAX_BACKOFF), (500, MAX_BACKOFF)])
def test_failures_make_it_rarer_and_never_stop_it(num_failed, factor):
    state = PoolState(began_s=1000.0, num_failed=num_failed)
    assert not state.is_due(RULE, 100, 1000.0 + 60 * factor - 1)
    assert state.is_due(RULE, 100, 1000.0 + 60 * factor)
