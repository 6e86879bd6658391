"""The risk of the policy `relaxed` with a ladder, certified on the risk split: see `replay` and `certificate`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from calibrator_service.calibration.report.certificate import (
    DELTA,
    MARGINS,
    THRESHOLDS,
    Certificate,
    certify_margins,
    certify_thresholds,
)
from calibrator_service.calibration.report.replay import Replayer
from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.spec import AnswerFile
from calibrator_service.calibration.text.risk_answers import RiskAnswers
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.text.stream import GivenText
from calibrator_service.calibration.training.tables import MAX_CHAIN
from shared.digests import digest_of
from shared.ladder.ladder import Ladder
from shared.ladder.risk import LOSS, RISK_KEYS, Setting
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.dtypes import dtype_name

# Reasons why nothing is certified.
GIVEN_TEXT, TOO_FEW_PROMPTS = "GIVEN_TEXT", "TOO_FEW_PROMPTS"
NONE_PASSED: dict[Setting, str] = {"threshold": "NO_THRESHOLD_PASSED", "margin": "NO_MARGIN_PASSED"}


def certified_risks(
    run: CalibrationRun, runner: ContiguousRunner, ladder: Ladder, answers: RiskAnswers
) -> dict[str, Any]:
    """The manifest's "risk" and "margin_risk" (see `shared.ladder.risk`). Without bounds they have a "reason".
    Raises `Cancelled`."""
    differing = Replayer(ladder, runner).differing(answers.sequences, on_batch=lambda: run.report("evaluating", 0.99))
    certified: dict[Setting, tuple[Sequence[float], Certificate]] = {
        "threshold": (THRESHOLDS, certify_thresholds([answer.threshold for answer in differing])),
        "margin": (MARGINS, certify_margins([answer.margin for answer in differing])),
    }
    return {
        RISK_KEYS[setting]: _record(run, answers, setting, values, certificate)
        for setting, (values, certificate) in certified.items()
    }


def _record(
    run: CalibrationRun, answers: RiskAnswers, setting: Setting, values: Sequence[float], certificate: Certificate
) -> dict[str, Any]:
    record = {
        "loss": LOSS,
        "delta": DELTA,
        "num_prompts": len(answers.sequences),
        "max_new_tokens": answers.max_new_tokens,
        "max_drafts": MAX_CHAIN,
        "level": certificate.level,
        "bounds": [{setting: bound.value, "epsilon": bound.epsilon} for bound in certificate.bounds],
        "differing": [
            {setting: value, "num_prompts": count}
            for value, count in zip(values, certificate.num_differing, strict=True)
        ],
        "data_digest": _digest(answers.sequences),
        "engine": {
            "model_fingerprint": run.loaded.fingerprint,
            "dtype": dtype_name(run.loaded.model.dtype),
            "compute_dtype": dtype_name(run.loaded.compute_dtype),
            "device": run.loaded.device.type,
            "torch": torch.__version__,
        },
    }
    if not certificate.bounds:
        record["reason"] = _reason_without_bounds(answers, setting)
    return record


def _reason_without_bounds(answers: RiskAnswers, setting: Setting) -> str:
    if isinstance(answers.text, GivenText) and not isinstance(answers.text.source, AnswerFile):
        return GIVEN_TEXT
    return NONE_PASSED[setting] if answers.sequences else TOO_FEW_PROMPTS


def _digest(sequences: Sequence[TokenSequence]) -> str:
    """The digest of prompts and answers, in order."""
    parts = (
        np.array([sequence.answer_start, len(sequence.tokens), *sequence.tokens], dtype=np.int64).tobytes()
        for sequence in sequences
    )
    return digest_of(*parts)
