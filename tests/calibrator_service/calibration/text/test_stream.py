"""A calibration's text has figures that people understand, and a budget that cannot pay for it is named early."""

import json
from pathlib import Path
from typing import Any

import pytest

from calibrator_service.calibration.plan import resolve
from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.spec import AnswerFile, CalibrationSpec
from calibrator_service.calibration.text import stream
from calibrator_service.calibration.text.self_generation import SelfGenerationConfig
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.text.splits import Splitter
from calibrator_service.calibration.text.stream import CollectingProgress, GeneratedText
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

# At least.
TEXT_SHARE_OF_BUDGET = 0.85


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.now = 100.0
    monkeypatch.setattr("calibrator_service.calibration.run.time", clock)
    monkeypatch.setattr(stream, "time", clock)
    return clock


def progress_of(loaded: LoadedModel, folder: Path, **spec: Any) -> tuple[CalibrationRun, CollectingProgress]:
    plan = resolve(CalibrationSpec(**spec), loaded)
    run = CalibrationRun(loaded, plan, folder, lambda _: None, lambda: False)
    return run, CollectingProgress(run, GeneratedText(SelfGenerationConfig()))


def test_the_speed_is_that_of_writing_alone(counting, tmp_path, clock):
    run, progress = progress_of(counting, tmp_path, max_tokens=10_000)
    clock.now += 30  # loading and starting
    progress.add_written(1)
    assert "tokens_per_s" not in run.figures, "there is no time to divide by"
    clock.now += 2
    progress.add_written(99)
    progress.pause()
    clock.now += 50  # states
    progress.set_learned(80)
    progress.resume()
    clock.now += 2
    progress.add_written(100)
    assert run.figures == {"generated_tokens": 200.0, "tokens": 80.0, "tokens_per_s": 50.0}


@pytest.mark.parametrize(
    ("read_s", "tokens_per_s", "end_s"),
    [(1, 20, None), (25, 20, None), (1, 1, 60), (1, 0, 60), (30, 2, 60), (99, 0, 60)],
)
def test_a_budget_that_is_too_short_is_named_early_with_one_that_would_do(
    counting, tmp_path, clock, read_s, tokens_per_s, end_s
):
    """The time that prompts take is no speed of writing."""

    def write(budget_s: float) -> CalibrationRun:
        run, progress = progress_of(counting, tmp_path / f"{budget_s}", time_budget_s=budget_s)
        clock.now += 15  # a slow start alone says nothing
        progress.add_written(0)
        try:
            for second in range(int(0.9 * TEXT_SHARE_OF_BUDGET * budget_s) - 15):
                clock.now += 1
                progress.add_written(tokens_per_s if second >= read_s else 0)
        finally:
            seconds.append(run.elapsed_s())
        return run

    seconds: list[float] = []
    if end_s is None:
        assert write(100).figures["generated_tokens"] >= stream.MIN_WRITTEN_TOKENS
        return
    with pytest.raises(InvalidInput) as caught:
        write(100)
    assert caught.value.reason == "BUDGET_TOO_SHORT"
    assert seconds[-1] < end_s, "before the time is over"
    needed_s = int(caught.value.metadata["needed_s"])
    if tokens_per_s:
        assert needed_s < 5 * stream.MIN_WRITTEN_TOKENS
        assert write(needed_s).figures["generated_tokens"] >= stream.MIN_WRITTEN_TOKENS
    else:
        assert 200 < needed_s < 600


def test_what_a_killed_run_has_written_counts(counting, tmp_path, clock):
    _, progress = progress_of(counting, tmp_path, time_budget_s=100.0)
    progress.num_assigned = stream.MIN_WRITTEN_TOKENS
    progress.add_written(0)
    clock.now += 60
    progress.add_written(0)


def test_a_killed_run_goes_on_with_the_same_given_text(counting, tmp_path):
    """Though more time is left then: the last chunk is in the sums, and is not to become another one."""
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": [5 + i % 20], "answer": [5 + (i * n) % 24 for n in range(12)]} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    text = stream.GivenText(AnswerFile(str(path)))

    def late(most: int) -> list[TokenSequence]:
        run, progress = progress_of(counting, tmp_path / "work", max_tokens=10_000)
        found: list[TokenSequence] = []
        progress.is_late = lambda: len(found) + 1 >= most
        for _, sequence in stream.split_sequences(run, text, Splitter(), progress, None):
            found.append(sequence)
        return found

    first = late(7)
    assert 5 <= len(first) <= 8
    assert late(1) == late(30) == first
