"""How much faster exact answers held-out prompts than full depth, with a clock that steps alone move."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from calibrator_service.calibration.report import speed
from calibrator_service.calibration.report.speed import LEAST_ANSWERS, MAX_ANSWERS, MOST_TIMES, speed_figures
from shared.engine.drafting.pass_costs import PassCosts
from shared.engine.step import Decoder
from shared.ladder.tables import SequenceTables
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel
from tests.calibrator_service.calibration.report.test_relaxed import Saying, run_of, sequences
from tests.scripted_tables import native_script


class Counting(Saying):
    """Mostly right: the model counts, by one or by two."""

    def tables(self, *arguments: Any) -> "CountingTables":
        return CountingTables(*arguments)


class CountingTables(SequenceTables):
    def __init__(self, *arguments: Any) -> None:
        self.tokens: list[int] = []
        super().__init__(*arguments, script=native_script(self._next))

    def append(self, tokens: Sequence[int]) -> None:
        super().append(tokens)
        self.tokens += tokens

    def _next(self, drafted: Sequence[int]) -> tuple[int, float]:
        before, last = [*self.tokens, *drafted][-2:]
        return (last - 5 + 1 + (before % 2 == 0)) % 24 + 5, 0.9


@pytest.fixture(autouse=True)
def _a_step_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, step = [0.0], Decoder.step

    def timed_step(decoder: Decoder, *arguments: Any) -> Any:
        now[0] += 1.0
        return step(decoder, *arguments)

    monkeypatch.setattr(Decoder, "step", timed_step)
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(speed, "measured_costs", lambda *_, **__: PassCosts((1.0,) * 9))


def figures_of(loaded: LoadedModel, ladder: Any, count: int = 8, **limits: Any) -> tuple[dict[str, float], Any]:
    run = run_of(max_new_tokens=24, **limits)
    run.figures = {}
    return speed_figures(run, ContiguousRunner(loaded), ladder, sequences(count)), run


def test_the_speed_up_is_that_of_steps_after_the_first_token(counting):
    figures, run = figures_of(counting, Counting(0, 0.9))
    assert figures["num_answers"] == 8
    assert figures["low"] <= figures["speed_up"] <= figures["high"]
    assert 2.0 < figures["speed_up"] < 9.0
    assert figures["tokens_per_pass"] == pytest.approx(figures["speed_up"], rel=0.2)
    assert run.figures["speed_up"] == figures["speed_up"]


def test_a_ladder_that_is_never_right_gains_nothing(counting):
    figures, _ = figures_of(counting, Saying(4, 0.9))
    assert figures["speed_up"] == figures["tokens_per_pass"] == 1.0


def test_there_are_as_many_answers_as_there_is_time_for(counting):
    # Three seconds; each answer takes one, then nearly three.
    assert figures_of(counting, Saying(4, 0.9), 20, budget_s=100.0, step_s=1.0)[0]["num_answers"] == LEAST_ANSWERS
    assert figures_of(counting, Saying(4, 0.9), 20, budget_s=100.0, step_s=2.9)[0]["num_answers"] == MOST_TIMES
    assert figures_of(counting, Saying(4, 0.9), 60)[0]["num_answers"] == MAX_ANSWERS
    few, run = figures_of(counting, Saying(4, 0.9), LEAST_ANSWERS - 1)
    assert (few, run.figures) == ({"num_answers": LEAST_ANSWERS - 1}, {})
