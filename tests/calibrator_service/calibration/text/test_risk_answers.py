"""The risk split: whole greedy answers to prompts that no other split has."""

import math
from pathlib import Path

import pytest
import torch

from calibrator_service.calibration.text import risk_answers
from calibrator_service.calibration.text.engine_writer import EngineWriter
from calibrator_service.calibration.text.risk_answers import Limits, RiskAnswerGenerator
from calibrator_service.calibration.text.self_generation import SelfGenerationConfig, SelfGenerator
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.text.splits import Splitter
from calibrator_service.calibration.text.writer import Pace
from shared.errors import Cancelled
from shared.model.loaded import LoadedModel

CONFIG = SelfGenerationConfig(max_new_tokens=20)
WORDS = [f"w{number}" for number in range(24)]
ENDLESS = Limits(24, 16, math.inf)


def prompt_of(sequence: TokenSequence) -> tuple[int, ...]:
    return sequence.tokens[: sequence.answer_start]


def answers(
    loaded: LoadedModel,
    folder: Path,
    config: SelfGenerationConfig = CONFIG,
    dealt=lambda _: False,
    limits: Limits = ENDLESS,
    pace: Pace | None = None,
):  # type: ignore[no-untyped-def]
    writer = EngineWriter(loaded, limits.rows)
    try:
        generator = RiskAnswerGenerator(loaded, config, folder, dealt)
        return generator.answers(limits, writer, pace or Pace())
    finally:
        writer.close()


def learnt(loaded: LoadedModel, folder: Path, config: SelfGenerationConfig):  # type: ignore[no-untyped-def]
    writer = EngineWriter(loaded, 16)
    try:
        pieces = SelfGenerator(loaded, config, folder).pieces(writer, Pace(), folder / "rest")
        return [sequence for piece in pieces for sequence in piece]
    finally:
        writer.close()


@pytest.mark.parametrize("chat", [True, False])
def test_answers_are_greedy_and_whole(counting, base_model, tmp_path, chat):
    loaded = counting if chat else base_model
    found = answers(loaded, tmp_path)
    assert 10 < len(found) <= ENDLESS.num_prompts
    for sequence in found[:6]:
        prompt = torch.tensor([prompt_of(sequence)])
        expected = loaded.model.generate(prompt, do_sample=False, max_new_tokens=20, pad_token_id=1)[0].tolist()
        assert list(sequence.tokens) == expected
        assert sequence.num_answer_tokens == 20 or sequence.tokens[-1] in loaded.eos_token_ids


def test_loops_do_not_end_an_answer(counting, tmp_path):
    """Training text ends at a loop. Answers of the risk split must not, because a worker continues."""
    config = SelfGenerationConfig(max_new_tokens=60, prompts=tuple(WORDS))
    free = learnt(counting, tmp_path, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calibrator_service.calibration.text.writer.is_repeating", lambda tokens: True)
        cut = learnt(counting, tmp_path / "cut", config)
        judged = answers(counting, tmp_path, config)
    longest = max(sequence.num_answer_tokens for sequence in free)
    assert max(sequence.num_answer_tokens for sequence in cut) < longest
    assert max(sequence.num_answer_tokens for sequence in judged) == longest


def test_prompts_of_other_splits_are_left_out(counting, tmp_path):
    everything = answers(counting, tmp_path / "all")
    splitter = Splitter()
    for sequence in everything[::3]:
        splitter.assign(sequence)
    rest = answers(counting, tmp_path / "rest", dealt=splitter.has_assigned)
    dealt = {prompt_of(sequence) for sequence in everything[::3]}
    assert {prompt_of(sequence) for sequence in rest}.isdisjoint(dealt)
    assert rest


def test_a_late_round_is_dropped_as_a_whole(counting, tmp_path, monkeypatch):
    """An incomplete answer would count as one without a difference."""
    now, real = [0.0], risk_answers.write_all

    def slow(writer, requests, pace):  # type: ignore[no-untyped-def]
        now[0] += 4.0
        return real(writer, requests, pace)

    monkeypatch.setattr(risk_answers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(risk_answers, "write_all", slow)
    config = SelfGenerationConfig(max_new_tokens=20, prompts=tuple(WORDS))
    assert len(answers(counting, tmp_path / "a", config, limits=Limits(24, 4, 9.0))) == 16
    assert answers(counting, tmp_path / "b", config, limits=Limits(24, 4, 3.0)) == []


def test_answers_are_repeatable_and_can_be_cancelled(counting, tmp_path):
    with pytest.raises(Cancelled):
        answers(counting, tmp_path, pace=Pace(should_stop=lambda: True))
    first = answers(counting, tmp_path)
    assert answers(counting, tmp_path) == first
    assert answers(counting, tmp_path / "again") == first
