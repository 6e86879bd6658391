"""Decoder layers compiled by torch.compile, each as one graph. The gates stay outside.

All layers of a model run the same code over different weights. The caches of paged passes ignore the layer's number, so
the compiled code does not depend on it, and one compilation per kind of layer and size of pass serves all layers. A
model that uses the number in another way compiles once per layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shared.errors import UnsupportedModel
from shared.model.gates import Forward, LayerOutput

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
