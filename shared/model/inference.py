"""PyTorch's inference mode for the methods of a pass."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def inference(function: Callable[P, T]) -> Callable[P, T]:
    """`function` in inference mode. As `torch.inference_mode()`, but a call within the mode does not enter it again:
    a step calls several such functions, and entering it takes 20 us."""

    @functools.wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return within
