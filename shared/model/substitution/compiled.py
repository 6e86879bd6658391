"""Decoder layers compiled by torch.compile, one by one: the gates outside, everything in a layer in one graph.

All layers of a model run the same code over other weights, so one compilation per kind of layer and size of pass serves them all: the
caches of paged passes ignore a layer's number, so nothing that is compiled depends on it. A model that uses the number otherwise
compiles once per layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shared.errors import UnsupportedModel
from shared.model.gates import Forward, LayerOutput

# Kinds of layers times sizes of passes; beyond this torch would run uncompiled.
MAX_COMPILATIONS = 64


class LayerCompiler:
    """A `LayerTransform`. `backend` is torch.compile's."""

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        self._backend = backend
        self._by_class: dict[type, Callable[..., LayerOutput]] = {}

    def __call__(self, index: int, forward: Forward) -> Forward:
        """Raises `UnsupportedModel` (reason PAGES_NOT_SUPPORTED) where a layer's forward is not its class' own."""
        layer = getattr(forward, "__self__", None)
        if layer is None or getattr(forward, "__func__", None) is not type(layer).forward:
            raise UnsupportedModel(
                f"layer {index} runs a forward of somebody else's", reason="PAGES_NOT_SUPPORTED"
            )
        kind = type(layer)
        if kind not in self._by_class:
            self._by_class[kind] = torch.compile(
                kind.forward,
                fullgraph=True,
                dynamic=False,
                backend=self._backend,
            )
        compiled = partial(self._by_class[kind], layer)

        def run(*args: Any, **kwargs: Any) -> LayerOutput:
            with torch._dynamo.config.patch(recompile_limit=MAX_COMPILATIONS):
                return compiled(*args, **kwargs)

        return run
