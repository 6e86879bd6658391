"""What finished answers of the policy exact took is counted by alias, version and load, and nothing else is."""

import math

import pytest

from shared.engine.drafting.pass_costs import PassCosts
from shared.engine.served import LEAST_TOKENS, Pace, ServedCounts
from shared.ladder.policy import DepthPolicy
from shared.served import MAX_SERVED, MOST_TOKENS, ServedKey
from tests.families import NUM_LAYERS
from tests.fixed_costs import fixed_cost_engine
from tests.known_answer import NUM_NEW, PROMPT, request
from tests.waiting import wait_until

COSTS = PassCosts((1.0, 1.2, 1.4, 1.6), wide=((16, 4.0), (32, 7.0)))


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [(0.5, 1.0), (1, 1.0), (1.5, 1.1), (4, 1.6), (10, 2.8), (16, 4.0), (24, 5.5), (32, 7.0), (63, 7.0 + 31 * 6 / 31)],
)
def test_a_pass_costs_what_lies_between_its_neighbours(num_tokens, seconds):
    assert COSTS.pass_s(num_tokens) == pytest.approx(seconds)


def test_costs_of_a_single_pass_grow_with_its_tokens():
    assert PassCosts((2.0,)).pass_s(3) == pytest.approx(6.0)


def counts() -> ServedCounts:
    made = ServedCounts(NUM_LAYERS)
    made.costs = COSTS
    return made


def record(made: ServedCounts, pace: Pace, *, alias="latest", version=3, passes=10, drafted=20, executions=0) -> None:
    made.record(alias, version, pace, num_passes=passes, num_drafted=drafted, num_executions=executions)


def test_an_answer_counts_with_what_full_depth_would_have_taken():
    made = counts()
    record(made, Pace(20, 10, 15.0, 10))
    ((key, served),) = made.by_key.items()
    assert key == ServedKey("latest", 3, 0)
    assert made.by_load == {0: served}
    assert (served.num_requests, served.num_tokens, served.num_passes, served.num_drafted) == (1, 20, 10, 20)
    # Twenty passes of one token instead of ten of three, on a machine on which the latter took 15 s.
    assert served.full_seconds == pytest.approx(15.0 * 20 * 1.0 / (10 * 1.4))
    assert served.weighted_log == pytest.approx(20 * math.log(15.0 / 20))


def test_layers_that_drafted_make_full_depth_the_faster_one():
    made = counts()
    record(made, Pace(10, 10, 10.0, 10), executions=2 * 10 * NUM_LAYERS, drafted=0)
    assert made.by_key[ServedKey("latest", 3, 0)].full_seconds == pytest.approx(5.0)


def test_without_costs_nothing_is_said_of_full_depth():
    made = ServedCounts(NUM_LAYERS)
    record(made, Pace(20, 10, 15.0, 10))
    assert made.by_key[ServedKey("latest", 3, 0)].full_seconds == 0.0


@pytest.mark.parametrize(("running", "load"), [(10, 0), (14, 0), (16, 1), (24, 1), (26, 2), (40, 2), (46, 3), (80, 3)])
def test_loads_are_powers_of_two_of_requests_that_share_the_steps(running, load):
    made = counts()
    record(made, Pace(20, 10, 15.0, running))
    assert [key.load for key in made.by_key] == [load]


def test_short_answers_do_not_count_and_long_ones_weigh_no_more():
    made = counts()
    record(made, Pace(LEAST_TOKENS - 1, 5, 1.0, 5))
    record(made, Pace(20, 5, 0.0, 5))
    assert not made.by_key
    record(made, Pace(10_000, 5000, 100.0, 5000))
    assert made.by_key[ServedKey("latest", 3, 0)].weight == MOST_TOKENS


def test_keys_are_bounded_and_the_ones_used_last_stay():
    made = counts()
    for number in range(MAX_SERVED + 10):
        record(made, Pace(20, 10, 15.0, 10), version=number)
        record(made, Pace(20, 10, 15.0, 10), version=0)
    assert len(made.by_key) == MAX_SERVED
    assert ServedKey("latest", 0, 0) in made.by_key
    assert ServedKey("latest", 1, 0) not in made.by_key


def test_an_engine_counts_whole_answers_of_exact_alone(loaded):
    with fixed_cost_engine(loaded) as engine:
        engine.generate(PROMPT, policy="full", max_tokens=NUM_NEW)
        engine.generate(PROMPT, policy=DepthPolicy("relaxed", margin=0.1), max_tokens=NUM_NEW)
        cut = engine.submit(request(100))
        next(cut.events())
        cut.cancel()
        wait_until(lambda: not engine.num_running)
        assert not engine.statistics.served.by_key
        engine.generate(PROMPT, policy="exact", max_tokens=NUM_NEW)
        ((key, served),) = engine.statistics.served.by_key.items()
    assert key == ServedKey("", 0, 0)
    assert (served.num_requests, served.num_tokens) == (1, NUM_NEW - 1)
    assert 0 < served.num_passes <= NUM_NEW - 1
    assert served.seconds > 0
    assert served.full_seconds > 0
