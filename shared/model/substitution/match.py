"""Compares a module with its replacement by running both on random input. The module's name does not matter."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-5  # largest error relative to the largest output

Forward = Callable[[Tensor], Tensor]


class Unsuitable(Exception):
    """The module does not compute what the op computes. The text says why."""


@dataclass(frozen=True)
class PackedLinear:
    """x @ weight.T + bias: the packed weight, N = `out_features`, and bias [N]."""

    packed: Tensor
    out_features: int
    bias: Tensor | None


@dataclass(frozen=True)
class RmsNorm:
    """x / rms(x) * (weight [D] + offset)."""

    weight: Tensor
    eps: float
    offset: float


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)). `gate` and `up` are packed. `bias` [2 * width]: gate's, then up's."""

    gate: Tensor
    up: Tensor
    width: int
    activation: str
    bias: Tensor | None
    down: PackedLinear


@dataclass(frozen=True)
class Substitute:
    """`forward` [..., K] -> [..., N] computes what the module computes, from the tensors `packed` instead of the module's weights."""

    forward: Forward
    recipe: PackedLinear | RmsNorm | GatedMlp  # the weights, for fusing several modules
    packed: tuple[Tensor, ...] = ()
    sources: tuple[nn.Module, ...] = ()  # modules whose `weight` is no longer read
    unpack: Callable[[], list[Tensor]] = list  # returns the weights of `sources`, in the same order


def random_input(*shape: int) -> Tensor:
    """Normal random numbers of the given shape, always the same. Does not change the global random state."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max |expected|; infinite if the shapes differ or a number is not finite."""
    if actual.shape != expected.shape or not (
        actual.isfinite().all() and expected.isfinite().all()
    ):
        return float("inf")
    scale = expected.abs().max().clamp_min(1e-30)
    return float((actual - expected).abs().max() / scale)


def agrees(actual: Forward, expected: Forward, *inputs: Tensor) -> bool:
    """Whether both functions agree within TOLERANCE on each input. Raises `Unsuitable` if `expected` fails or returns no tensor."""
    for x in inputs:
        try:
            wanted: Any = expected(x)
        except Exception as error:
            raise Unsuitable(f"does not run on a random tensor: {type(error).__name__}") from error
        if not isinstance(wanted, Tensor):
            raise Unsuitable("does not return a tensor")
        if relative_error(actual(x), wanted) > TOLERANCE:
            return False
    return True
