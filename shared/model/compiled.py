"""Decoder layers compiled by torch.compile, one by one: the gates outside, everything in a layer in one graph.

All layers of a model run the same code over other weights, so one compilation per kind of layer and size of pass serves them all. It
would not by itself: a layer's number, which it hands to the cache, is compiled in. The caches of paged passes ignore it, so the guard on
it is dropped; a model that makes another use of the number then gives wrong states, which the check before serving finds.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shared.errors import UnsupportedModel
from shared.model.gates import Forward, LayerOutput

# Kinds of layers times sizes of passes; beyond this torch would run uncompiled.
MAX_COMPILATIONS = 64
_LAYER_NUMBERS = (".layer_idx", ".layer_id", ".layer_index", ".block_idx")


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
                options={"guard_filter_fn": _all_but_layer_numbers},
            )
        compiled = partial(self._by_class[kind], layer)

        def run(*args: Any, **kwargs: Any) -> LayerOutput:
            with torch._dynamo.config.patch(recompile_limit=MAX_COMPILATIONS):
                return compiled(*args, **kwargs)

        return run


def _all_but_layer_numbers(guards: Sequence[Any]) -> list[bool]:
    return [not guard.name.endswith(_LAYER_NUMBERS) for guard in guards]
