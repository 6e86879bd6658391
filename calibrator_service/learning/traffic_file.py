"""Served answers as the file that a calibration reads: a pool's, newest first, so that a budget cuts the oldest."""

import json
from dataclasses import replace
from pathlib import Path

import structlog

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.spec import CalibrationSpec, ServedTraffic
from calibrator_service.sources import allowed_source
from shared.calibrator_settings import CalibratorSettings
from shared.traffic.traffic import MAX_READ_TOKENS, open_traffic

# More than a calibration uses of what it is limited to: prompts count here, and repeated answers.
TOKENS_READ_PER_LEARNED = 4
_NAME = "traffic.jsonl"

log = structlog.get_logger("neap.calibration")


def with_text(spec: CalibrationSpec, work_dir: Path, settings: CalibratorSettings) -> CalibrationSpec:
    """The spec whose source a calibration here may read, with the file of a pool's answers in `work_dir`. Raises as
    `allowed_source` and `fetch_traffic`."""
    source = allowed_source(spec.source, settings)
    if isinstance(source, ServedTraffic):
        limits = spec.max_tokens, settings.traffic_key
        path = fetch_traffic(settings.registry, spec.model_id, source, work_dir, *limits)
        source = replace(source, path=str(path))
    return replace(spec, source=source)


def fetch_traffic(
    registry: str, model_id: str, source: ServedTraffic, work_dir: Path, max_tokens: int, key_file: Path | None
) -> Path:
    """Writes what is kept of the pool into `work_dir`; later starts of the job find it there, whatever came or was
    forgotten since. `max_tokens`: that the calibration learns from; 0: no limit. Raises what the registry raises."""
    path = work_dir / _NAME
    if path.exists():
        return path
    limit = min(TOKENS_READ_PER_LEARNED * max_tokens or MAX_READ_TOKENS, MAX_READ_TOKENS)
    found = open_traffic(registry, key_file).read(model_id, source.pool, max_tokens=limit)
    log.info("served answers read", pool=source.pool, num_answers=len(found.answers), skipped=dict(found.skipped))
    lines = (
        json.dumps({"prompt": list(answer.prompt_ids), "answer": list(answer.answer_ids)}) + "\n"
        for answer in reversed(found.answers)
    )
    write_atomically(path, "".join(lines).encode())
    return path
