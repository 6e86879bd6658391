"""Chooses the runner of a model: paged KV and recorded passes on a GPU, the model's own forward elsewhere."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shared.errors import PreconditionFailed, UnsupportedModel
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.gates import Forward, LayerOutput
from shared.model.loaded import LoadedModel
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import CudaRecorder, NoRecorder
from shared.model.runner import Runner
from shared.ops.cards import check_card
from shared.ops.paged_on_gpu import has_triton

# Limit for kinds of layers times sizes of passes. Beyond its own, lower limit, torch would run layers uncompiled.
MAX_COMPILATIONS = 64


class LayerCompiler:
    """A `LayerTransform` that compiles. `backend` is an argument of torch.compile."""

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self._backend = backend
        self._by_class: dict[type, Callable[..., LayerOutput]] = {}

    def __call__(self, index: int, forward: Forward) -> Forward:
        """The compiled forward of a layer. Raises `UnsupportedModel` (reason PAGES_NOT_SUPPORTED) if the layer's
        forward was replaced."""
        layer = getattr(forward, "__self__", None)
        if layer is None or getattr(forward, "__func__", None) is not type(layer).forward:
            raise UnsupportedModel(f"layer {index} does not run the forward of its class", reason="PAGES_NOT_SUPPORTED")
        kind = type(layer)
        if kind not in self._by_class:
            self._by_class[kind] = torch.compile(kind.forward, fullgraph=True, dynamic=False, backend=self._backend)
        compiled = partial(self._by_class[kind], layer)

        def run(*args: Any, **kwargs: Any) -> LayerOutput:
            with torch._dynamo.config.patch(recompile_limit=MAX_COMPILATIONS):
                return compiled(*args, **kwargs)

        return run


logger = logging.getLogger(__name__)


def make_runner(
    loaded: LoadedModel, kv_budget_bytes: int, *, record: bool | None = None, compile_layers: bool | None = None
) -> Runner:
    """The best runner that works for the model on its device.

    `record`: whether passes are recorded as CUDA graphs. `compile_layers`: whether layers run through torch.compile.
    None: if it works; if not, the log says why. Raises `PreconditionFailed` (reasons CANNOT_RECORD, CANNOT_COMPILE)
    with the reason if the argument is True but it does not work, and on a GPU as `check_card`.
    """
    asked: dict[str, Any] = {"kv_budget_bytes": kv_budget_bytes, "record": record, "compile_layers": compile_layers}
    if loaded.ranks is None:
        return own_runner(loaded, **asked)
    from shared.model.ranks.leading import lead

    loaded.ranks.tell(asked)  # each makes its own
    return lead(own_runner(loaded, **asked), loaded.ranks)


def own_runner(
    loaded: LoadedModel, kv_budget_bytes: int, *, record: bool | None = None, compile_layers: bool | None = None
) -> Runner:
    """As `make_runner`: that of this process, which runs its part of the model. Where ranks share the model, passes are
    recorded only if that is asked for, and layers not compiled: no machine has tried it yet."""
    if loaded.ranks is not None:
        record, compile_layers = record is True, compile_layers is True
    runner = _runner(loaded, kv_budget_bytes, record is not False, compile_layers is not False)
    check_runner(runner, record=bool(record), compile_layers=bool(compile_layers))
    return runner


def check_runner(runner: Runner, *, record: bool, compile_layers: bool) -> None:
    """Raises `PreconditionFailed` (reasons CANNOT_RECORD, CANNOT_COMPILE) if the runner does not do what is asked of
    it."""
    loaded = runner.loaded
    if record and not runner.records:
        raise PreconditionFailed(
            f"passes of {loaded.model_id} cannot be recorded on {loaded.device}: {runner.why_not_recorded}",
            reason="CANNOT_RECORD",
        )
    if compile_layers and not runner.compiles:
        raise PreconditionFailed(
            f"layers of {loaded.model_id} cannot be compiled on {loaded.device}: {runner.why_not_compiled}",
            reason="CANNOT_COMPILE",
        )


def _runner(loaded: LoadedModel, kv_budget_bytes: int, record: bool, compile_layers: bool) -> Runner:
    if loaded.device.type != "cuda":
        return ContiguousRunner(loaded, "only a GPU does this")
    check_card(loaded.device)
    if not has_triton():
        logger.warning("attention runs by torch's products, which is slow: the package triton is not installed")
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
        logger.warning("requests run one at a time, which is slow: %s", error.message)
        return ContiguousRunner(loaded, error.message)
    logger.info("%s runs %s", loaded.model_id, runner.description)
    return runner
