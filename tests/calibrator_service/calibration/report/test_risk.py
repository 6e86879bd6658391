"""The certified risk: consistent with the engine and published in the manifest, or absent with a reason."""

import copy
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from calibrator_service.calibration.pipeline import CalibrationResult, calibrate
from calibrator_service.calibration.report.certificate import MARGINS, THRESHOLDS
from calibrator_service.calibration.report.replay import Differing, Replayer
from calibrator_service.calibration.report.risk import certified_risks
from calibrator_service.calibration.spec import AnswerFile, CalibrationSpec, SelfGenerated, TextFile
from calibrator_service.calibration.text.engine_writer import EngineWriter
from calibrator_service.calibration.text.risk_answers import (
    Limits,
    RiskAnswerGenerator,
    RiskAnswers,
    write_risk_answers,
)
from calibrator_service.calibration.text.self_generation import SelfGenerationConfig
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.text.stream import GeneratedText, GivenText
from calibrator_service.calibration.text.writer import Pace
from shared.ladder.artefact import pack_ladder
from shared.ladder.policy import DepthPolicy
from shared.ladder.risk import PublishedRisk
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.own_thread import run_in_own_thread
from tests.calibrator_service.calibration.conftest import make_model
from tests.fixed_costs import fixed_cost_engine

NUM_NEW = 24
PROMPTS = tuple(f"w{first} w{second}" for first in range(24) for second in range(24))
POLICIES = [
    *(DepthPolicy("relaxed", threshold=threshold) for threshold in (0.35, 0.6, 0.9)),
    *(DepthPolicy("relaxed", margin=margin) for margin in (0.01, 0.1, 1.0)),
]
SPEC = CalibrationSpec(
    source=SelfGenerated(PROMPTS, max_new_tokens=NUM_NEW), max_tokens=3000, rung_depths=(0, 2), router_width=16
)


def calibrated(loaded: LoadedModel, folder: Path) -> CalibrationResult:
    with patch("calibrator_service.calibration.plan.num_decoded_rows", lambda _: 160):
        return calibrate(loaded, SPEC, work_dir=folder)


@pytest.fixture(scope="module")
def result(base_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> CalibrationResult:
    return calibrated(base_model, tmp_path_factory.mktemp("risk"))


def with_rounded_matmuls(loaded: LoadedModel, folder: Path) -> LoadedModel:
    """The same model with weights in bfloat16, multiplied in it."""
    copy.deepcopy(loaded.model).bfloat16().save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return load_model(folder, compute_dtype=torch.bfloat16)


def test_the_report_states_the_certified_risk_and_its_data(result):
    risk = result.report["risk"]
    assert risk["num_prompts"] == len(PROMPTS) // 5
    assert risk["max_new_tokens"] == NUM_NEW
    counts = [row["num_prompts"] for row in risk["differing"]]
    assert [row["threshold"] for row in risk["differing"]] == list(THRESHOLDS)
    assert counts == sorted(counts)
    assert 0 < counts[-1] <= risk["num_prompts"]
    assert risk["data_digest"].startswith("sha256:")
    assert risk["engine"]["model_fingerprint"] == result.ladder.model_fingerprint
    manifest, _ = pack_ladder(result.ladder, result.report)
    published = PublishedRisk.of(manifest)
    assert published is not None
    assert "risk" not in manifest["calibration"]
    assert (published.delta, published.num_tokens) == (0.05, NUM_NEW)
    safest, boldest = published.bounds[0], published.bounds[-1]
    assert published.epsilon_at(0.9995) == published.epsilon_at(THRESHOLDS[0]) == safest.epsilon
    assert published.epsilon_at(boldest.value - 0.01) is None
    # The share seen to differ is below what is promised.
    for bound in published.bounds:
        seen = counts[THRESHOLDS.index(bound.value)] / risk["num_prompts"]
        assert seen < bound.epsilon


def test_the_report_states_the_risk_of_margins_too(result):
    risk = result.report["margin_risk"]
    counts = [row["num_prompts"] for row in risk["differing"]]
    assert [row["margin"] for row in risk["differing"]] == list(MARGINS)
    assert counts == sorted(counts)
    assert counts[-1] > 0
    assert risk["data_digest"] == result.report["risk"]["data_digest"]
    manifest, _ = pack_ladder(result.ladder, result.report)
    published = PublishedRisk.of(manifest, "margin")
    assert (published is None) == (not risk["bounds"])


def test_every_difference_of_the_engine_is_found_by_the_replay(result, base_model, tmp_path):
    check_replay(base_model, result, tmp_path)


@pytest.mark.full
def test_rounded_matmuls_are_certified_as_they_are_served(tmp_path):
    loaded = with_rounded_matmuls(make_model(chat=False, accelerate=False), tmp_path / "model")
    result = calibrated(loaded, tmp_path / "work")
    engine = result.report["risk"]["engine"]
    assert (engine["dtype"], engine["compute_dtype"]) == ("float32", "bfloat16")
    check_replay(loaded, result, tmp_path)


def check_replay(loaded: LoadedModel, result: CalibrationResult, folder: Path) -> None:
    """The engine runs `relaxed` on new prompts, with thresholds so low and margins so wide that answers differ."""
    config = SelfGenerationConfig(seed=99, max_new_tokens=NUM_NEW)

    def written() -> Any:
        generator = RiskAnswerGenerator(loaded, config, folder, lambda _: False)
        with closing(EngineWriter(loaded, 80)) as writer:
            answers = generator.answers(Limits(80, 80, 300.0), writer, Pace())
        replayer = Replayer(result.ladder, ContiguousRunner(loaded))
        return answers, replayer.differing(answers)

    answers, replayed = run_in_own_thread(written)
    num_differing = {"threshold": 0, "margin": 0}
    with fixed_cost_engine(loaded, result.ladder) as engine:
        for policy in POLICIES:
            for answer, found in zip(answers, replayed, strict=True):
                prompt = answer.tokens[: answer.answer_start]
                said = engine.generate(prompt, policy=policy, max_tokens=NUM_NEW).token_ids
                if said != answer.tokens[answer.answer_start :]:
                    num_differing[policy.setting] += 1
                    if policy.margin is None:
                        assert found.threshold >= policy.threshold
                    else:
                        assert found.margin <= policy.margin
    assert min(num_differing.values()) > 3, "nothing was tried"


def some_run(loaded: LoadedModel) -> Any:
    return SimpleNamespace(loaded=loaded, report=lambda *_: None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GivenText(TextFile("a.txt")), "GIVEN_TEXT"),
        (GeneratedText(SelfGenerationConfig(prompts=("w1", "w2")), ()), "TOO_FEW_PROMPTS"),
    ],
)
def test_without_answers_nothing_is_certified(base_model, result, text, reason):
    run = some_run(base_model)
    answers = write_risk_answers(run, text, lambda _: False, EngineWriter(base_model, 2))
    runner = run_in_own_thread(ContiguousRunner, base_model)
    record = certified_risks(run, runner, result.ladder, answers)["risk"]
    assert (record["num_prompts"], record["bounds"], record["reason"]) == (0, [], reason)
    manifest, _ = pack_ladder(result.ladder, {**result.report, "risk": record})
    assert PublishedRisk.of(manifest) is None
    assert manifest["calibration"]["risk"]["reason"] == reason


def test_answers_that_were_given_before_leave_too_few_prompts_but_are_no_given_text(base_model, result):
    runner = run_in_own_thread(ContiguousRunner, base_model)
    answers = RiskAnswers(GivenText(AnswerFile("a.jsonl")))
    record = certified_risks(some_run(base_model), runner, result.ladder, answers)["risk"]
    assert record["reason"] == "TOO_FEW_PROMPTS"


def test_a_router_that_is_too_often_wrong_is_published_without_a_bound(base_model, result, monkeypatch):
    monkeypatch.setattr(Replayer, "differing", lambda *_, **__: [Differing(1.0, 0.0)] * 100)
    sequences = (TokenSequence((0, 5, 6), 2),) * 100
    answers = RiskAnswers(GeneratedText(SelfGenerationConfig(), ()), sequences, NUM_NEW)
    runner = run_in_own_thread(ContiguousRunner, base_model)
    records = certified_risks(some_run(base_model), runner, result.ladder, answers)
    record = records["risk"]
    assert (record["bounds"], record["reason"]) == ([], "NO_THRESHOLD_PASSED")
    assert records["margin_risk"]["reason"] == "NO_MARGIN_PASSED"
