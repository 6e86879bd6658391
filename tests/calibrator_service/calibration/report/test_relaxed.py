"""How often answers by relaxed differ, counted with the engine's own steps, and the intervals of these shares."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calibrator_service.calibration.report.held_out import wilson_interval
from calibrator_service.calibration.report.relaxed import (
    ANSWER_TOKENS,
    MAX_ANSWERS,
    POLICIES,
    PROMPTS_TOGETHER,
    TEXT_TOKENS,
    held_out_prompts,
    relaxed_figures,
)
from calibrator_service.calibration.states.collect import LabelledSequence
from shared.errors import Cancelled
from shared.ladder.joint_weights import DEFAULT_WEIGHTS
from shared.ladder.tables import SequenceTables
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel
from tests.fixed_costs import fixed_cost_engine
from tests.random_ladder import random_ladder
from tests.scripted_tables import native_script

NUM_NEW = 12


class Saying:
    """A bound ladder, whose tables say the same draft everywhere."""

    ladder = None
    depths = kept_depths = state_depths = names = agreements = layout = ()
    joint_weights = DEFAULT_WEIGHTS

    def __init__(self, token: int, probability: float) -> None:
        self.draft = token, probability

    def check_model(self, loaded: LoadedModel) -> None:
        """It is anybody's."""

    def bind(self, runner: object, beside: object = ()) -> "Saying":
        return self

    def memory(self) -> dict[int, int]:
        return {}

    def prepare(self) -> Iterator[None]:
        return iter(())

    def tables(self, *arguments: Any) -> SequenceTables:
        return SequenceTables(*arguments, script=native_script(lambda drafted: self.draft))


def run_of(*, step_s: float = 0.0, **plan: Any) -> Any:
    """A calibration whose every step takes `step_s` seconds."""
    times = iter(range(1_000_000))
    limits = {"max_new_tokens": NUM_NEW, "max_tokens": math.inf, "budget_s": math.inf, **plan}
    return SimpleNamespace(
        report=lambda *_: None, elapsed_s=lambda: step_s * next(times), plan=SimpleNamespace(**limits)
    )


def sequences(count: int) -> list[LabelledSequence]:
    """Answers from the third token on."""
    rows = [np.array([0, 5 + number % 20, 6 + number // 20, 9, 10, 11]) for number in range(count)]
    return [LabelledSequence(row, row, 2) for row in rows]


def figures_of(loaded: LoadedModel, ladder: Any, count: int = 4, run: Any = None) -> dict[str, Any]:
    return relaxed_figures(run or run_of(), ContiguousRunner(loaded), ladder, sequences(count))


def test_three_margins_and_three_thresholds_are_counted(counting):
    figures = figures_of(counting, random_ladder(counting, 0, agreement=0.9))
    assert (figures["num_answers"], figures["max_new_tokens"]) == (4, NUM_NEW)
    assert [sum(name in row for row in figures["settings"]) for name in ("margin", "threshold")] == [3, 3]
    for row in figures["settings"]:
        share = row["num_differing"] / 4
        assert row["low"] <= share <= row["high"]
        assert (row["num_differing"] == 0) == (row["num_tokens_differing"] == 0)
        assert 4 <= row["num_tokens"] <= 4 * NUM_NEW


def test_a_threshold_counts_what_it_lets_pass_and_nothing_else(counting):
    figures = figures_of(counting, Saying(4, 0.9))
    by_threshold = {row["threshold"]: row for row in figures["settings"] if "threshold" in row}
    assert [by_threshold[at]["num_differing"] for at in (0.99, 0.95, 0.85)] == [0, 0, 4]
    # The model never says this token. All but the first token of an answer are drafted, and one a pass is its own.
    boldest = by_threshold[0.85]
    assert boldest["num_tokens_differing"] > boldest["num_tokens"] / 2


@pytest.mark.parametrize("token", [4, 20])
def test_an_answer_differs_where_the_engines_does(counting, token):
    ladder: Any = Saying(token, 0.9)
    [prompt] = held_out_prompts(sequences(1), 100)
    rows = figures_of(counting, ladder, 1)["settings"]
    for policy, row in zip(POLICIES, rows, strict=True):
        with fixed_cost_engine(counting, ladder, tries_promise=False) as engine:
            full, relaxed = (engine.generate(prompt, policy=one, max_tokens=NUM_NEW) for one in ("full", policy))
        assert row["num_differing"] == (full.token_ids != relaxed.token_ids)
        assert row["num_tokens"] == relaxed.stats.num_tokens
        assert row["num_tokens_differing"] == relaxed.stats.num_relaxed
    assert any(row["num_differing"] for row in rows)


@pytest.mark.parametrize(
    ("limits", "num_answers"),
    [
        ({}, 20),
        ({"budget_s": 100.0, "step_s": 1e6}, PROMPTS_TOGETHER),
        ({"max_tokens": 6 * len(POLICIES) * NUM_NEW}, 6),
        ({"max_tokens": 1}, PROMPTS_TOGETHER),
        pytest.param({"max_new_tokens": 1000}, 20, marks=pytest.mark.full),
    ],
)
def test_there_are_as_many_answers_as_time_and_text_allow(counting, limits, num_answers):
    figures = figures_of(counting, Saying(4, 0.5), 20, run_of(**limits))
    assert figures["num_answers"] == num_answers <= MAX_ANSWERS
    assert figures["max_new_tokens"] <= ANSWER_TOKENS


def test_without_prompts_there_are_no_figures_and_a_cancelled_job_ends(counting):
    assert figures_of(counting, Saying(4, 0.5), 0)["num_answers"] == 0

    def stop(*_: object) -> None:
        raise Cancelled("the calibration was cancelled")

    run = run_of()
    run.report = stop
    with pytest.raises(Cancelled):
        figures_of(counting, Saying(4, 0.5), 4, run)


def test_prompts_are_those_of_answers_once_each_or_the_beginning_of_a_text():
    twice = [*sequences(3), *sequences(2)]
    assert held_out_prompts(twice, 100) == [(0, 5, 6), (0, 6, 6), (0, 7, 6)]
    assert held_out_prompts(twice[:1], 2) == [(5, 6)]
    text = np.arange(200)
    [prompt] = held_out_prompts([LabelledSequence(text, text, 0)], 1000)
    assert prompt == tuple(range(TEXT_TOKENS))


def test_wilsons_interval():
    assert wilson_interval(2, 10, 1.96) == pytest.approx((0.0567, 0.5098), abs=1e-4)
    assert wilson_interval(0, 10, 1.96) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson_interval(10, 10, 1.96) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert wilson_interval(0, 0, 1.96) == (0.0, 1.0)
    assert wilson_interval(3 * 10**6, 10**7, 1.96) == pytest.approx((0.3, 0.3), abs=1e-3)
