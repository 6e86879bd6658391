"""Which exits a ladder loses: those that agree no more often than the commonest token, and those that cost more than
they save."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from calibrator_service.calibration.report import worth
from calibrator_service.calibration.report.worth import without_unpaid
from calibrator_service.calibration.spec import CalibrationSpec
from shared.engine.drafting.pass_costs import ExitCost, PassCosts
from shared.ladder.artefact import pack_ladder, unpack_ladder
from shared.ladder.ladder import Ladder
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel
from tests.random_ladder import random_ladder

# A saved token is worth 9 ms: 10 ms of a pass, less the growth of the pass by its draft.
DEEP = (0.010, 0.011)

Judge = Callable[..., tuple[Ladder, dict[str, str]]]


@pytest.fixture
def judged(counting: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Judges a ladder of two exits by the figures of both and the seconds that each costs."""

    def judge(
        *, agreement: float = 0.4, positions: int = 1000, commonest: float = 0.05,
        seconds: tuple[float, ...] = (0.001, 0.001), named: tuple[int, ...] = (), is_child: bool = False,
    ) -> tuple[Ladder, dict[str, str]]:  # fmt: skip
        def costs(*_: Any) -> PassCosts:
            return PassCosts(DEEP, exits=tuple(ExitCost(one, one) for one in seconds))

        monkeypatch.setattr(worth, "measured_costs", costs)
        figures = {"positions": positions, "agreement_1": agreement, "agreement_1_beside_tables": agreement / 2}
        report = {"proposers": {"depth-0": figures, "depth-2": figures}, "commonest_token": commonest}
        run: Any = SimpleNamespace(spec=CalibrationSpec(exit_depths=named))
        ladder = random_ladder(counting, seed=0)
        return without_unpaid(run, ContiguousRunner(counting), ladder, report, is_child=is_child)

    return judge


def test_exits_that_pay_stay(judged):
    ladder, left_out = judged()
    assert ladder.proposer_names == ("depth-0", "depth-2")
    assert left_out == {}


@pytest.mark.parametrize("agreement", [0.02, 0.05, 0.06])
def test_an_exit_must_agree_more_often_than_the_commonest_token(judged, agreement):
    """By more than chance: of 1,000 positions, 60 are not clearly more than 50."""
    ladder, left_out = judged(agreement=agreement, seconds=(0.0, 0.0))
    assert ladder.exits == ()
    assert "commonest token on 5.0%" in left_out["depth-0"]
    assert judged(agreement=agreement + 0.05, seconds=(0.0, 0.0))[1] == {}


@pytest.mark.parametrize("positions", [0, 6, 49])
def test_nothing_is_concluded_from_few_positions(judged, positions):
    ladder, left_out = judged(agreement=0.9, positions=positions)
    assert ladder.exits == ()
    assert left_out["depth-2"].startswith(f"{positions} held-out positions are too few")


def test_a_child_with_little_text_keeps_the_exits_of_its_parent(judged):
    assert judged(agreement=0.0, positions=49, seconds=(1.0, 1.0), is_child=True)[1] == {}
    assert set(judged(agreement=0.0, positions=50, is_child=True)[1]) == {"depth-0", "depth-2"}


def test_an_exit_must_save_more_than_it_costs_here(judged):
    """At 0.2 beside the tables a question saves 1.8 ms."""
    ladder, left_out = judged(seconds=(0.0017, 0.0019))
    assert ladder.proposer_names == ("depth-0",)
    assert ladder.draft_vocabulary is not None
    assert "it would not pay here" in left_out["depth-2"]
    assert "20.0%" in left_out["depth-2"]


def test_an_exit_that_was_asked_for_may_be_meant_for_another_machine(judged):
    assert judged(seconds=(1.0, 1.0), named=(0, 2))[1] == {}
    assert set(judged(agreement=0.01, named=(0, 2))[1]) == {"depth-0", "depth-2"}


def test_a_ladder_without_exits_is_an_artefact(judged):
    ladder, _ = judged(seconds=(1.0, 1.0))
    assert ladder.draft_vocabulary is None
    assert unpack_ladder(*pack_ladder(ladder, {})).proposer_names == ()


def test_costs_are_measured_with_the_ladder(counting):
    told: list[str] = []
    run: Any = SimpleNamespace(report=lambda phase, _: told.append(phase))
    costs = worth.measured_costs(run, ContiguousRunner(counting), random_ladder(counting, seed=0))
    assert len(costs.verify) == 2
    assert all(one.alone_s > 0 for one in costs.exits)
    assert len(costs.exits) == 2
    assert set(told) == {"evaluating"}


def test_other_processes_do_not_make_an_exit_seem_expensive(counting, monkeypatch):
    """Four measurements of five are disturbed: what counts is what the work takes undisturbed."""
    disturbed = [60.0, 0.0] * 4
    now = itertools.accumulate(itertools.chain((0.0,), itertools.cycle((1.0, 0.0, *disturbed))))
    monkeypatch.setattr("shared.engine.drafting.costs.time.perf_counter", lambda: next(now))
    run: Any = SimpleNamespace(report=lambda *_: None)
    costs = worth.measured_costs(run, ContiguousRunner(counting), random_ladder(counting, seed=0))
    assert costs.verify[0] == 1.0
    assert [one.alone_s for one in costs.exits] == [1.0, 1.0]
