"""What a calibration certifies: consistent with the engine, in the manifest, or not there and why."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calibrator_service.calibration.certify import THRESHOLDS, Certificate
from calibrator_service.calibration.held_out import HeldOutGenerator, Limits
from calibrator_service.calibration.pipeline import calibrate
from calibrator_service.calibration.replay import Replayer
from calibrator_service.calibration.risk_split import RiskSplit
from calibrator_service.calibration.selfgen import SelfgenConfig
from calibrator_service.calibration.spec import CalibrationResult, CalibrationSpec, SelfGenerated
from calibrator_service.calibration.splits import Splitter
from inference_service.engine.engine import Engine
from shared.ladder.artefact import pack_ladder
from shared.ladder.policy import DepthPolicy
from shared.ladder.risk import PublishedRisk
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.load import LoadedModel
from shared.model.own_thread import in_own_thread

NUM_NEW = 24
PROMPTS = tuple(f"w{first} w{second}" for first in range(24) for second in range(24))
SPEC = CalibrationSpec(
    source=SelfGenerated(PROMPTS, max_new_tokens=NUM_NEW),
    max_tokens=3000,
    rung_depths=(0, 2),
    router_width=16,
)


@pytest.fixture(scope="module")
def result(base_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> CalibrationResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calibrator_service.calibration.presets.rows_together", lambda _: 160)
        return calibrate(base_model, SPEC, work_dir=tmp_path_factory.mktemp("risk"))


def test_a_calibration_says_what_was_certified_and_on_what(result: CalibrationResult) -> None:
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
    assert published.epsilon_at(boldest.threshold - 0.01) is None
    # The share seen to differ is below what is promised.
    for bound in published.bounds:
        seen = counts[THRESHOLDS.index(bound.threshold)] / risk["num_prompts"]
        assert seen < bound.epsilon


def test_where_the_engine_differs_the_replay_does(
    result: CalibrationResult, base_model: LoadedModel, tmp_path: Path
) -> None:
    """New prompts, relaxed by the engine as it happens to plan it, at thresholds bold enough for it to go wrong."""
    config = SelfgenConfig(seed=99, max_new_tokens=NUM_NEW)

    def written() -> Any:
        generator = HeldOutGenerator(base_model, config, tmp_path, lambda _: False)
        answers = generator.answers(Limits(40, 40, 60.0), lambda: False)
        replayer = Replayer(result.ladder, ContiguousRunner(base_model))
        return answers, replayer.highest_differing(answers, 0.3)

    answers, highest = in_own_thread(written)
    num_differing = 0
    with Engine(base_model, result.ladder) as engine:
        for threshold in (0.35, 0.6, 0.9):
            for answer, most in zip(answers, highest, strict=True):
                prompt = answer.tokens[: answer.answer_start]
                policy = DepthPolicy("relaxed", threshold=threshold)
                said = engine.generate(prompt, policy=policy, max_tokens=NUM_NEW).token_ids
                if said != answer.tokens[answer.answer_start :]:
                    num_differing += 1
                    assert most >= threshold
    assert num_differing > 3, "nothing was tried"


def split(loaded: LoadedModel, **material: Any) -> RiskSplit:
    defaults = {"splitter": Splitter(), "selfgen": SelfgenConfig(), "risk_prompts": ()}
    run = SimpleNamespace(loaded=loaded, elapsed_s=lambda: 0.0)
    return RiskSplit(run, SimpleNamespace(**{**defaults, **material}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("material", "reason"),
    [
        ({"selfgen": None}, "GIVEN_TEXT"),
        ({"selfgen": SelfgenConfig(prompts=("w1", "w2"))}, "TOO_FEW_PROMPTS"),
    ],
)
def test_nothing_is_certified_from_nothing(
    base_model: LoadedModel, result: CalibrationResult, material: dict[str, Any], reason: str
) -> None:
    risk = split(base_model, **material)
    risk.gather()
    record = risk.certified(result.ladder, in_own_thread(ContiguousRunner, base_model))
    assert (record["num_prompts"], record["bounds"], record["reason"]) == (0, [], reason)
    manifest, _ = pack_ladder(result.ladder, {**result.report, "risk": record})
    assert PublishedRisk.of(manifest) is None
    assert manifest["calibration"]["risk"]["reason"] == reason


def test_a_router_that_is_too_often_wrong_is_published_without_a_bound(
    base_model: LoadedModel, result: CalibrationResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "calibrator_service.calibration.risk_split"
    monkeypatch.setattr(f"{module}.certify", lambda highest: Certificate((), 0.01, (9,) * 14))
    risk = split(base_model)
    monkeypatch.setattr(risk, "_answers", [None])
    monkeypatch.setattr(f"{module}.Replayer.highest_differing", lambda *_, **__: [1.0])
    monkeypatch.setattr(f"{module}._digest", lambda answers: "")
    record = risk.certified(result.ladder, in_own_thread(ContiguousRunner, base_model))
    assert record["reason"] == "NO_THRESHOLD_PASSED"
