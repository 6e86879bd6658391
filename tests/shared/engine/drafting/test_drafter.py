"""A draft must pay for the time in which the host makes it."""

from dataclasses import replace

import pytest
import torch

from shared.engine.drafting import chains
from shared.engine.drafting.drafter import HostTime
from shared.engine.drafting.planner import MIN_SURVIVAL, PassCosts, least_survival
from shared.model.loaded import wrap_model
from tests.families import build_family
from tests.fixed_costs import FixedCosts, fixed_cost_engine
from tests.scripted_ladder import ScriptedLadder

FLAT = PassCosts((1.0,) * 9)


def test_the_least_survival_is_what_a_drafts_time_costs_in_tokens():
    assert least_survival(FLAT, 8) == MIN_SURVIVAL
    assert least_survival(FLAT, 8, 0.05) == pytest.approx(0.4)
    assert least_survival(FLAT, 1, 0.05) == pytest.approx(0.05)
    assert least_survival(FLAT, 8, 1.0) == 1.0
    growing = replace(FLAT, verify=tuple(1.0 + 0.01 * n for n in range(9)))
    assert least_survival(growing, 1, 0.05) == pytest.approx(0.06)


def test_a_mean_follows_what_places_take_and_shrinks_while_none_are_asked_about():
    host = HostTime()
    assert host.per_place_s == 0.0
    host.record(0.5, 0)
    host.record(5.0, 1)
    assert host.per_place_s == 0.0, "neither a step without places nor the first one with some says anything"
    for _ in range(200):
        host.record(0.3, 3)
    assert host.per_place_s == pytest.approx(0.1)
    for _ in range(200):
        host.record(0.8, 4)
    assert host.per_place_s == pytest.approx(0.2, rel=0.01)
    before = host.per_place_s
    for _ in range(200):
        host.record(0.3, 0)
    assert 0.0 < host.per_place_s < 0.2 * before


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("look_up_s", "drafts_go_on"), [(0.0, True), (0.001, True), (10.0, False)])
def test_drafting_ends_where_the_host_takes_longer_than_a_draft_saves(monkeypatch, look_up_s, drafts_go_on):
    clock = Clock()
    monkeypatch.setattr(chains, "time", clock)
    torch.manual_seed(0)
    loaded = wrap_model(build_family("llama"), accelerate=True)

    def table(context: list[int]) -> tuple[int, float]:
        clock.now_s += look_up_s
        return 3, 0.6

    def exits(context: list[int]) -> tuple[int, float]:
        clock.now_s += 1000.0  # of the device, and no time of the host
        return 4, 0.7

    options = {"max_tokens": 30, "ignore_eos": True}
    # Passes of about a second.
    with fixed_cost_engine(loaded, ScriptedLadder(table, exits, (2,)), cost_meter=FixedCosts()) as engine:
        full = engine.generate((5, 6, 7), policy="full", **options)
        exact = engine.generate((5, 6, 7), policy="exact", **options)
    assert exact.token_ids == full.token_ids
    assert exact.stats.num_drafted > 0, "the first step draft, and what it takes is known afterwards"
    assert (exact.stats.num_drafted > 30) == drafts_go_on
