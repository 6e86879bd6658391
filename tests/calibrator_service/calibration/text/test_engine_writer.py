"""Text that an engine writes equals what `generate` gives, answer by answer."""

import itertools
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from calibrator_service.calibration.plan import resolve
from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.spec import CalibrationSpec, TextFile
from calibrator_service.calibration.text import engine_writer
from calibrator_service.calibration.text.engine_writer import EngineWriter, pays_for_copy, text_writer
from calibrator_service.calibration.text.writer import (
    LOOP_PERIOD,
    LOOP_TAIL,
    Pace,
    WriteRequest,
    is_repeating,
    write_all,
)
from shared.engine.step import Decoder
from shared.errors import Cancelled, Exhausted
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from tests.worker import save_model

PROMPTS = [(0, 7, 9), (0, 6), (0, 11, 12, 20, 8, 9, 25), (0, 28, 5), (0, 10, 10, 3)]


@pytest.fixture
def writer(counting: LoadedModel):  # type: ignore[no-untyped-def]
    writer = EngineWriter(counting, rows=2)
    yield writer
    writer.close()


def answers(writer: EngineWriter, requests: list[WriteRequest], **pace) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    return [written.tokens for written in write_all(writer, requests, Pace(**pace))]


def alone(loaded: LoadedModel, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    output = loaded.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=count, pad_token_id=1)
    return tuple(output[0, len(prompt) :].tolist())


def test_greedy_answers_equal_generate_and_all_tokens_are_counted(counting, writer):
    counted: list[int] = []
    requests = [WriteRequest(prompt, 20) for prompt in PROMPTS]
    together = answers(writer, requests, on_tokens=counted.append)
    assert together == [alone(counting, prompt, 20) for prompt in PROMPTS]
    assert sum(counted) == sum(map(len, together))


def test_a_stop_token_ends_an_answer_without_changing_the_others(writer):
    free = answers(writer, [WriteRequest(prompt, 20) for prompt in PROMPTS])
    stop = free[2][3]
    stopped = answers(writer, [WriteRequest(prompt, 20, frozenset({stop})) for prompt in PROMPTS])
    for row, other in zip(stopped, free, strict=True):
        assert row == other[: other.index(stop)] if stop in other else row == other
    assert len({len(row) for row in stopped}) > 1


def test_sampling_is_repeatable_whatever_runs_beside_it(counting, writer):
    def sampled(first: int) -> list[WriteRequest]:
        return [WriteRequest((0,), 10, temperature=2.0, top_p=0.95, seed=first + i) for i in range(8)]

    found = answers(writer, sampled(1))
    assert len(set(found)) > 4
    assert answers(writer, sampled(4))[:5] == found[3:]


@pytest.mark.parametrize("last", range(1, 6))
def test_a_count_that_raises_ends_the_writing_also_when_an_answer_has_just_ended(writer, last):
    calls = itertools.count(1)

    def count(_: int) -> None:
        if next(calls) == last:
            raise Cancelled("stop")

    requests = [WriteRequest(prompt, 1) for prompt in PROMPTS]
    with pytest.raises(Cancelled):
        answers(writer, requests, on_tokens=count)
    assert all(answers(writer, requests))


def test_only_greedy_answers_of_the_model_itself_are_its_choices(counting):
    requests = [WriteRequest((0, 7), 4), WriteRequest((0, 7), 4, temperature=1.0)]
    for is_own in (True, False):
        writer = EngineWriter(counting, 2, is_own=is_own)
        assert [w.is_choice for w in write_all(writer, requests, Pace())] == [is_own, False]
        writer.close()


def test_a_request_may_follow_from_an_answer(writer):
    """The last one does: there is none left when it ends."""
    waiting, found = [WriteRequest((0, 7, 9), 3)], []
    for written in writer.write(lambda: waiting.pop() if waiting else None, Pace()):
        found.append(written.tokens)
        if len(found) < 4:
            waiting.append(WriteRequest((0, 7, 9, *written.tokens), 3))
    assert len(found) == 4


def test_answers_arrive_when_they_end(writer):
    requests = [WriteRequest((0, 7), 120, stop_loops=False, stop_ids=frozenset())]
    requests += [WriteRequest((0, 9), 2) for _ in range(3)]
    rest = iter(requests)
    order = [written.index for written in writer.write(lambda: next(rest, None), Pace())]
    assert order[-1] == 0, "the long answer held nothing up"


def test_late_answers_end_where_they_are(writer):
    requests = [WriteRequest(prompt, 100, stop_loops=False) for prompt in PROMPTS]
    whole = answers(writer, requests)
    num_written = 0

    def count(num_tokens: int) -> None:
        nonlocal num_written
        num_written += num_tokens

    cut = answers(writer, requests, is_late=lambda: num_written > 0, on_tokens=count)
    assert any(cut)
    assert not all(cut), "nothing begins once it is late"
    for row, other in zip(cut, whole, strict=True):
        assert row == other[: len(row)]


def test_cancelled(writer):
    with pytest.raises(Cancelled):
        answers(writer, [WriteRequest((0, 7), 50)], should_stop=lambda: True)
    assert answers(writer, []) == []
    assert answers(writer, [WriteRequest((0, 7), 2)]), "the writer can go on"


def test_an_error_of_the_engine_is_raised(writer, monkeypatch):
    monkeypatch.setattr(
        "shared.engine.request.admission.Admission.check", lambda *_: (_ for _ in ()).throw(Exhausted("full"))
    )
    with pytest.raises(Exhausted):
        answers(writer, [WriteRequest((0, 7), 2)])


def test_nobody_else_runs_the_model_in_idle_time(writer, monkeypatch):
    steps: list[int] = []
    real = Decoder.step

    def step(self, *arguments):  # type: ignore[no-untyped-def]
        steps.append(threading.get_ident())
        return real(self, *arguments)

    monkeypatch.setattr(Decoder, "step", step)
    rest = iter([WriteRequest(prompt, 60, stop_loops=False) for prompt in PROMPTS * 2])
    paused = 0
    for _ in writer.write(lambda: next(rest, None), Pace()):
        with writer.idle():
            before = len(steps)
            threading.Event().wait(0.02)
            assert len(steps) == before
            paused += 1
    assert paused == 2 * len(PROMPTS)
    assert threading.get_ident() not in steps


def test_the_model_is_free_after_close(counting, writer):
    answers(writer, [WriteRequest((0, 7), 2)])
    writer.close()
    other = EngineWriter(counting, 2)
    assert answers(other, [WriteRequest((0, 7), 2)])
    other.close()


def test_loops_end_an_answer_at_the_same_token_each_time(counting, writer, monkeypatch):
    module = "calibrator_service.calibration.text.writer.is_repeating"
    monkeypatch.setattr(module, lambda tokens: len(tokens) >= 16)
    requests = [WriteRequest((0, 7), 60, stop_loops=stops) for stops in (True, False)]
    for _ in range(3):
        cut, whole = answers(writer, requests)
        assert cut == whole[:16]
        assert len(whole) > 16


def test_loops() -> None:
    assert is_repeating([1, 2, 3] * LOOP_TAIL)
    assert is_repeating([9, 8, 7] + [4] * LOOP_TAIL)
    assert not is_repeating([4] * (LOOP_TAIL - 1))
    assert not is_repeating(list(range(LOOP_TAIL)) * 2)
    assert not is_repeating(list(range(LOOP_PERIOD + 1)) * 9)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_model(tmp_path_factory.mktemp("model")), model_id="tiny")


@pytest.fixture(autouse=True)
def _fast_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": True})


def run_of(loaded: LoadedModel, folder: Path, **spec: Any) -> CalibrationRun:
    plan = resolve(CalibrationSpec(**spec), loaded)
    return CalibrationRun(loaded, plan, folder, lambda _: None, lambda: False)


@pytest.mark.parametrize(
    ("change", "spec", "pays"),
    [
        ({"load_s": 10.0}, {"time_budget_s": 150.0}, True),
        ({"load_s": 40.0}, {"time_budget_s": 150.0}, False),
        ({"load_s": 20.0}, {"time_budget_s": 3600.0}, True),
        ({}, {"max_tokens": 20_000}, True),
        ({}, {"max_tokens": 19_999}, False),
        ({"source": None}, {"time_budget_s": 3600.0}, False),
        ({"acceleration": None}, {"time_budget_s": 3600.0}, False),
        ({"compute_dtype": torch.bfloat16}, {"time_budget_s": 3600.0}, False),
    ],
)
def test_when_a_copy_pays(loaded, tmp_path, change, spec, pays):
    assert pays_for_copy(run_of(replace(loaded, **change), tmp_path, **spec)) is pays


def test_no_copy_on_a_processor_without_bfloat16_or_without_memory(loaded, tmp_path, monkeypatch):
    run = run_of(loaded, tmp_path, time_budget_s=3600.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
        assert not pays_for_copy(run)
    monkeypatch.setattr(engine_writer, "available_bytes", lambda _: 1000)
    assert not pays_for_copy(run)


def test_the_text_of_a_copy_is_not_the_models_own_choice(loaded, tmp_path):
    run = run_of(loaded, tmp_path, max_tokens=20_000)
    requests = [WriteRequest((50, 60), 8)]
    with closing(text_writer(run)) as writer:
        [by_copy] = write_all(writer, requests, Pace())
    assert by_copy.tokens
    assert not by_copy.is_choice


def test_given_text_needs_no_copy_and_a_fleet_replaces_it(loaded, tmp_path):
    run = run_of(loaded, tmp_path, max_tokens=20_000, source=TextFile("a.txt"))
    with closing(text_writer(run)) as writer:
        [answer] = write_all(writer, [WriteRequest((50, 60), 8)], Pace())
    assert answer.is_choice
    fleet: Any = SimpleNamespace()
    assert text_writer(run_of(loaded, tmp_path, max_tokens=20_000), lambda _: fleet) is fleet
