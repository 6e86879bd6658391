"""The whole calibration: collect, train heads, train routers, measure, certify. Streaming, bounded, resumable."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibrator_service.calibration.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.fit import fit_heads, fit_ladder
from calibrator_service.calibration.material import Material
from calibrator_service.calibration.presets import quick
from calibrator_service.calibration.report import held_out_report
from calibrator_service.calibration.risk_split import RiskSplit
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.spec import CalibrationResult, CalibrationSpec, Progress
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.load import LoadedModel
from shared.model.own_thread import in_own_thread


def calibrate(
    loaded: LoadedModel,
    spec: CalibrationSpec | None = None,
    *,
    work_dir: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> CalibrationResult:
    """A ladder for a frozen model, with its held-out figures. Without a spec, or bounds in it: `presets.quick`.

    `work_dir` keeps what was collected and trained, so that a killed run continues where it was; the same spec, model and folder
    give the same ladder (unless a time budget cuts differently). It may be deleted afterwards; None: a temporary folder.
    Raises `InvalidInput`, `NotFound` and `Unavailable` for sources that do not work, `Cancelled` when `should_stop`,
    `Corrupt` for a work folder that was tampered with, and `Exhausted` for a full disk.
    """
    spec = spec or quick(loaded.model_id)
    folder = work_dir or Path(tempfile.mkdtemp(prefix="neap-calibration-"))
    try:
        return in_own_thread(run_phases, Run(loaded, spec, folder, progress, should_stop))
    finally:
        if work_dir is None:
            shutil.rmtree(folder, ignore_errors=True)


def run_phases(run: Run) -> CalibrationResult:
    """One after the other, in the thread that called: its OpenMP pool ends with it. Raises as `calibrate`."""
    run.tell("loading", 0.0)
    runner = ContiguousRunner(run.loaded)
    material = Material(run, runner)
    risk = RiskSplit(run, material)

    def collect() -> None:
        material.gather()
        risk.gather()

    run.timed("collecting", collect)
    tokens = material.frequent_choices(run.plan.draft_vocabulary_size)
    vocabulary = DraftVocabulary.of(run.loaded, tokens)
    heads = run.timed("training_heads", lambda: fit_heads(run, material, vocabulary))
    ladder = run.timed("training_routers", lambda: fit_ladder(run, material, vocabulary, heads))

    def evaluate() -> dict[str, Any]:
        report = held_out_report(run, runner, material, vocabulary, ladder)
        return {**report, "risk": risk.certified(ladder, runner)}

    report = run.timed("evaluating", evaluate)
    measured = tuple(
        replace(layer_exit, agreement=report["rungs"][layer_exit.name]["agreement"])
        for layer_exit in ladder.exits
    )
    report["seconds"] = {**run.seconds, "total": run.elapsed_s()}
    run.tell("publishing", 1.0)
    return CalibrationResult(replace(ladder, exits=measured), report)
