"""The risk of the policy `relaxed` with a ladder, certified on the risk split: see `replay` and `certificate`."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from calibrator_service.calibration.report.certificate import DELTA, THRESHOLDS, certify
from calibrator_service.calibration.report.replay import Replayer
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.spec import AnswerFile
from calibrator_service.calibration.text.risk_answers import RiskAnswers
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.text.stream import GivenText
from calibrator_service.calibration.training.tables import MAX_CHAIN
from shared.ladder.ladder import Ladder
from shared.ladder.risk import LOSS
from shared.model.contiguous_runner import ContiguousRunner

# Reasons why nothing is certified.
GIVEN_TEXT, TOO_FEW_PROMPTS, NO_THRESHOLD = "GIVEN_TEXT", "TOO_FEW_PROMPTS", "NO_THRESHOLD_PASSED"


def certified_risk(
    run: Run, runner: ContiguousRunner, ladder: Ladder, answers: RiskAnswers
) -> dict[str, Any]:
    """The manifest's "risk" (see `shared.ladder.risk`). Without bounds it has a "reason". Raises `Cancelled`."""
    highest = Replayer(ladder, runner).highest_differing(
        answers.sequences, THRESHOLDS[-1], on_batch=lambda: run.report("evaluating", 0.99)
    )
    certificate = certify(highest)
    record = {
        "loss": LOSS,
        "delta": DELTA,
        "num_prompts": len(answers.sequences),
        "max_new_tokens": answers.max_new_tokens,
        "max_drafts": MAX_CHAIN,
        "level": certificate.level,
        "bounds": [asdict(bound) for bound in certificate.bounds],
        "differing": [
            {"threshold": threshold, "num_prompts": count}
            for threshold, count in zip(THRESHOLDS, certificate.num_differing, strict=True)
        ],
        "data_digest": _digest(answers.sequences),
        "engine": {
            "model_fingerprint": run.loaded.fingerprint,
            "dtype": str(run.loaded.model.dtype).removeprefix("torch."),
            "device": run.loaded.device.type,
            "torch": torch.__version__,
        },
    }
    if not certificate.bounds:
        record["reason"] = _reason_without_bounds(answers)
    return record


def _reason_without_bounds(answers: RiskAnswers) -> str:
    if isinstance(answers.text, GivenText) and not isinstance(answers.text.source, AnswerFile):
        return GIVEN_TEXT
    return NO_THRESHOLD if answers.sequences else TOO_FEW_PROMPTS


def _digest(sequences: Sequence[TokenSequence]) -> str:
    """SHA-256 over prompts and answers, in order."""
    digest = hashlib.sha256()
    for sequence in sequences:
        head = np.array([sequence.answer_start, len(sequence.tokens)], dtype=np.int64)
        digest.update(head.tobytes() + np.array(sequence.tokens, dtype=np.int64).tobytes())
    return f"sha256:{digest.hexdigest()}"
