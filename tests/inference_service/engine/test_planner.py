import pytest

from inference_service.engine.planner import ExitGains, PassCosts, Trust, best_length, exit_pays

FLAT = PassCosts(deep=(1.0,) * 9, exits=(0.01,))
STEEP = PassCosts(deep=tuple(float(n) for n in range(1, 10)), exits=(0.01,))
STEP = PassCosts(deep=(1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0), exits=(0.2,))


def rate(probabilities: list[float], costs: PassCosts, count: int) -> float:
    expected, survival = 1.0, 1.0
    for probability in probabilities[:count]:
        survival *= probability
        expected += survival
    return expected / costs.deep[count]


@pytest.mark.parametrize("costs", [FLAT, STEEP, STEP])
@pytest.mark.parametrize(
    "probabilities", [[], [0.9] * 8, [0.5] * 8, [0.1] * 8, [0.9, 0.1, 0.9, 0.9], [0.99] * 20]
)
def test_the_length_is_the_best_of_all(probabilities: list[float], costs: PassCosts) -> None:
    chosen = best_length(probabilities, costs)
    lengths = range(min(len(probabilities), costs.max_drafts) + 1)
    assert rate(probabilities, costs, chosen) == max(
        rate(probabilities, costs, count) for count in lengths
    )


def test_where_tokens_cost_as_much_as_passes_nothing_is_drafted() -> None:
    assert best_length([0.9] * 8, STEEP) == 0


def test_a_step_in_the_cost_is_crossed_only_if_it_pays() -> None:
    assert best_length([0.9, 0.9, 0.9, 0.1, 0.1], STEP) == 3
    assert best_length([0.99] * 8, STEP) == 8


def test_an_exit_is_asked_when_it_gains_more_than_it_costs() -> None:
    assert exit_pays(1.0, 0.4, 0, STEP)
    assert not exit_pays(1.0, 0.1, 0, STEP)
    assert not exit_pays(0.2, 0.4, 0, STEP)
    assert exit_pays(1.0, 0.1, 0, FLAT)


def test_an_exits_worth_is_learnt_apart_for_sure_and_unsure_tables() -> None:
    gains = ExitGains((0.4, 0.9))
    assert gains.expected(0, 0.1) == pytest.approx(0.3)
    assert gains.expected(0, 0.9) == 0.0
    for _ in range(200):
        gains.record(0, 0.1, 0.15)
        gains.record(0, 0.5, 0.2)
    assert gains.expected(0, 0.1) == pytest.approx(0.05, abs=0.02)
    assert gains.expected(0, 0.5) < 0.01
    assert gains.expected(1, 0.1) == pytest.approx(0.8)
    gains.record(1, 1.0, 0.5)


def test_trust_falls_with_rejections_and_comes_back() -> None:
    trust = Trust()
    assert trust.adjusted(0.8) == pytest.approx(0.8)
    for _ in range(20):
        trust.record([0.8, 0.8, 0.8], 0)
    assert trust.adjusted(0.8) < 0.3
    for _ in range(200):
        trust.record([0.8], 1)
    assert trust.adjusted(0.8) > 0.75
    assert trust.adjusted(0.999) < 1.0


def test_drafts_after_the_first_rejected_one_do_not_count() -> None:
    trust = Trust()
    before = trust.expected
    trust.record([0.5, 0.6, 0.7], 1)
    assert trust.expected - before == pytest.approx(1.1)
    assert trust.accepted - before == pytest.approx(1.0)
