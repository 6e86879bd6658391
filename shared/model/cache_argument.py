"""The argument in which a model of transformers takes its KV cache: `cache` from version 5.24 on, `past_key_values`
before.

The name is read from the model, not from the version, so a model with a forward of its own may have either.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers.cache_utils import Cache

from shared.errors import UnsupportedModel

CACHE_ARGUMENTS = ("cache", "past_key_values")
# What layers call it; those of GPT-NeoX and Falcon have a name of their own.
LAYER_CACHE_ARGUMENTS = (*CACHE_ARGUMENTS, "layer_past")


def cache_argument(model: nn.Module) -> str:
    """The argument's name in the forward of `model`, and in its output.

    Raises `UnsupportedModel` if the forward does not take a KV cache.
    """
    name = _name(type(model).forward)
    if name is None:
        architecture = type(model).__name__
        raise UnsupportedModel(
            f"{architecture} cannot be run in parts: its forward takes no KV cache",
            metadata={"architecture": architecture},
        )
    return name


@functools.cache
def _name(forward: Callable[..., Any]) -> str | None:
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


def with_cache(model: nn.Module, cache: Cache) -> dict[str, Cache]:
    """`cache` as a keyword argument for the forward of `model`."""
    return {cache_argument(model): cache}


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """The KV cache among the keyword arguments of a layer's call; None if there is none."""
    for name in LAYER_CACHE_ARGUMENTS:
        if (cache := arguments.get(name)) is not None:
            return cache
    return None
