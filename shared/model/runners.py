"""Which runner serves a model: passes over pages, recorded, on a GPU; the model's own way anywhere else."""

import logging

from shared.errors import PreconditionFailed, UnsupportedModel
from shared.model.load import LoadedModel
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import CudaRecorder, NoRecorder
from shared.model.runner import DepthRunner
from shared.model.substitution.compiled import LayerCompiler
from shared.ops import library

logger = logging.getLogger(__name__)


def make_runner(
    loaded: LoadedModel,
    kv_budget_bytes: int,
    *,
    record: bool | None = None,
    compile_layers: bool | None = None,
) -> DepthRunner:
    """`record` passes as CUDA graphs, `compile_layers` by torch.compile; None: where it works, and what does not is logged.

    Raises `PreconditionFailed` (reasons CANNOT_RECORD, CANNOT_COMPILE) where one was asked for and cannot be had.
    """
    runner = _runner(loaded, kv_budget_bytes, record is not False, compile_layers is not False)
    records, compiles = False, False
    if isinstance(runner, PagedRunner):
        records, compiles = runner.records, runner.compiles
    if record and not records:
        raise PreconditionFailed(
            f"passes of {loaded.model_id} cannot be recorded on {loaded.device}: the log says why",
            reason="CANNOT_RECORD",
        )
    if compile_layers and not compiles:
        raise PreconditionFailed(
            f"layers of {loaded.model_id} cannot be compiled on {loaded.device}: the log says why",
            reason="CANNOT_COMPILE",
        )
    return runner


def _runner(
    loaded: LoadedModel, kv_budget_bytes: int, record: bool, compile_layers: bool
) -> DepthRunner:
    if loaded.device.type != "cuda":
        return DepthRunner(loaded)
    if not library.runs_on("cuda"):
        logger.warning("neap's kernels are not built for CUDA: requests go one by one, and slowly")
        return DepthRunner(loaded)
    try:
        runner = PagedRunner(
            loaded,
            kv_budget_bytes=kv_budget_bytes,
            recorder=CudaRecorder(loaded.device) if record else NoRecorder(),
            transform=LayerCompiler() if compile_layers else None,
        )
    except UnsupportedModel as error:
        if error.reason != "PAGES_NOT_SUPPORTED":
            raise
        logger.warning("requests go one by one, and slowly: %s", error.message)
        return DepthRunner(loaded)
    logger.info(
        "%s runs over %d pages, %s, layers %s",
        loaded.model_id,
        runner.pool.num_pages,
        "recorded" if runner.records else "not recorded",
        "compiled" if runner.compiles else "not compiled",
    )
    return runner
