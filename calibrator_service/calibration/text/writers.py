"""Who writes a calibration's text: the model itself, a copy of it in bfloat16 where that is faster, or others'
machines."""

import math
from collections.abc import Callable

import structlog
import torch

from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.spec import SelfGenerated
from calibrator_service.calibration.text.engine_writer import EngineWriter
from calibrator_service.calibration.text.stream import TEXT_SHARE
from calibrator_service.calibration.text.writer import Writer
from shared.engine.memory.budget import available_bytes
from shared.model.dtypes import multiplies_bfloat16
from shared.model.load import load_model
from shared.model.loaded import LoadedModel

# A copy writes nearly twice as fast, so it pays if loading it takes at most this share of the time to write, or,
# without a time budget, from this many tokens on.
COPY_LOAD_SHARE, MIN_COPY_TOKENS = 0.25, 20_000
# Free memory that a copy needs, in bytes per parameter: its weights, and as much again while they are packed.
COPY_PARAMETER_BYTES = 4

log = structlog.get_logger("neap.calibration")


def text_writer(run: CalibrationRun, fleet_of: Callable[[Writer], Writer] | None = None) -> Writer:
    """Who writes the text of the splits. To be closed. `fleet_of`: see `pipeline.calibrate`."""
    own = EngineWriter(run.loaded, run.plan.sizes.rows)
    if not isinstance(run.spec.source, SelfGenerated):
        return own
    if fleet_of is not None:
        return fleet_of(own)
    if not run.has_collected and pays_for_copy(run):
        log.info("text is written with a copy of the model in bfloat16")
        return EngineWriter(bfloat16_copy(run.loaded), run.plan.sizes.rows, is_own=False)
    return own


def pays_for_copy(run: CalibrationRun) -> bool:
    """Whether writing with a copy of the model in bfloat16 is faster, even though it must be loaded first."""
    loaded = run.loaded
    if loaded.source is None or loaded.acceleration is None or not multiplies_bfloat16():
        return False
    if loaded.compute_dtype != loaded.model.dtype:
        return False
    num_parameters = loaded.model.num_parameters()
    if COPY_PARAMETER_BYTES * num_parameters > available_bytes(loaded.device):
        return False
    left_s = TEXT_SHARE * run.schedule.collecting * run.plan.budget_s - run.elapsed_s()
    if math.isinf(left_s):
        return run.plan.max_tokens >= MIN_COPY_TOKENS
    return loaded.load_s <= COPY_LOAD_SHARE * left_s


def bfloat16_copy(loaded: LoadedModel) -> LoadedModel:
    """The model loaded again, with weights, keys, values and products in bfloat16. Raises as `load_model`."""
    assert loaded.source is not None
    return load_model(
        loaded.source,
        model_id=loaded.model_id,
        dtype=torch.bfloat16,
        compute_dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        context_length=loaded.context_length,
    )
