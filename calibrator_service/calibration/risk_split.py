"""What the policy relaxed risks with a ladder, certified on the risk split: see `held_out`, `replay` and `certify`."""

import hashlib
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from calibrator_service.calibration.certify import DELTA, THRESHOLDS, certify
from calibrator_service.calibration.held_out import HeldOutGenerator, Limits
from calibrator_service.calibration.material import Material
from calibrator_service.calibration.presets import COLLECTING_ENDS, RISK_PROMPTS, RISK_TEXT_ENDS
from calibrator_service.calibration.replay import Replayer
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.shards import TokenSequence
from calibrator_service.calibration.tables import MAX_CHAIN
from shared.ladder.ladder import Ladder
from shared.ladder.risk import LOSS
from shared.model.runner import Runner

# Tokens written per prompt, in answers' lengths: some prompts are written, too.
TOKENS_PER_PROMPT = 1.15
# How much longer than planned the text may take before what is not whole is dropped.
PATIENCE = 2.0
# Why nothing is certified.
GIVEN_TEXT, NO_PROMPTS, TOO_RISKY = "GIVEN_TEXT", "TOO_FEW_PROMPTS", "NO_THRESHOLD_PASSED"


class RiskSplit:
    """Empty until `gather`, which needs the other splits to be there."""

    def __init__(self, run: Run, material: Material) -> None:
        self._run, self._material = run, material
        self._answers: list[TokenSequence] = []
        self._max_new_tokens = 0
        self._begun_s = run.elapsed_s()

    def gather(self) -> None:
        """Has the model write its answers. Only its own text says what it would say: given text leaves the split empty.

        Raises `Cancelled`, and `Corrupt` for a file of an earlier run that cannot be read.
        """
        run, config = self._run, self._material.selfgen
        if config is None or (config.prompts and not self._material.risk_prompts):
            return
        config = replace(config, prompts=self._material.risk_prompts)
        has_dealt = self._material.splitter.has_dealt
        generator = HeldOutGenerator(run.loaded, config, run.folder, has_dealt)
        self._max_new_tokens = generator.max_new_tokens
        limits = self._limits()
        planned = max(TOKENS_PER_PROMPT * self._max_new_tokens * limits.num_prompts, 1.0)

        def on_tokens(count: int) -> None:
            written = run.figures.get("risk_tokens", 0.0) + count
            run.figures["risk_tokens"] = written
            span = RISK_TEXT_ENDS - COLLECTING_ENDS
            run.tell("collecting", COLLECTING_ENDS + span * min(written / planned, 1.0))

        self._answers = generator.answers(limits, run.should_stop, on_tokens)

    def _limits(self) -> Limits:
        """How many prompts depends on time alone, never on what the answers hold."""
        run, rows = self._run, self._run.plan.rows
        seconds = run.left_s(RISK_TEXT_ENDS)
        if seconds == float("inf"):
            return Limits(RISK_PROMPTS, rows, seconds)
        written = run.figures.get("generated_tokens", 0.0)
        tokens_per_s = written / max(run.elapsed_s() - self._begun_s, 1e-3)
        # Where a run that was killed found its text again, nothing is known: half of what decodes together.
        fitting = seconds * tokens_per_s / (TOKENS_PER_PROMPT * self._max_new_tokens)
        count = min(int(fitting) if written else rows // 2, RISK_PROMPTS)
        return Limits(count, rows, PATIENCE * seconds)

    def certified(self, ladder: Ladder, runner: Runner) -> dict[str, Any]:
        """The manifest's "risk" (see `shared.ladder.risk`), or, without bounds, why there is none: "reason". Raises `Cancelled`."""
        answers = self._answers
        highest = Replayer(ladder, runner).highest_differing(
            answers, THRESHOLDS[-1], on_batch=lambda: self._run.tell("evaluating", 0.99)
        )
        certificate = certify(highest)
        model = self._run.loaded
        record = {
            "loss": LOSS,
            "delta": DELTA,
            "num_prompts": len(answers),
            "max_new_tokens": self._max_new_tokens,
            "max_drafts": MAX_CHAIN,
            "level": certificate.level,
            "bounds": [asdict(bound) for bound in certificate.bounds],
            "differing": [
                {"threshold": threshold, "num_prompts": count}
                for threshold, count in zip(THRESHOLDS, certificate.num_differing, strict=True)
            ],
            "data_digest": _digest(answers),
            "engine": {
                "model_fingerprint": model.fingerprint,
                "dtype": str(model.model.dtype).removeprefix("torch."),
                "device": model.device.type,
                "torch": torch.__version__,
            },
        }
        if not certificate.bounds:
            record["reason"] = self._reason()
        return record

    def _reason(self) -> str:
        if self._material.selfgen is None:
            return GIVEN_TEXT
        return TOO_RISKY if self._answers else NO_PROMPTS


def _digest(answers: list[TokenSequence]) -> str:
    """Over prompts and answers, in order."""
    digest = hashlib.sha256()
    for answer in answers:
        head = np.array([answer.answer_start, len(answer.tokens)], dtype=np.int64)
        digest.update(head.tobytes() + np.array(answer.tokens, dtype=np.int64).tobytes())
    return f"sha256:{digest.hexdigest()}"
