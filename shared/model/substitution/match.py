"""Whether a module computes what its replacement computes. Decided by running both on random input, never by the module's name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-5  # largest error relative to the largest output

Forward = Callable[[Tensor], Tensor]


class Unsuitable(Exception):
    """The module is not what the op computes; the text says why."""


@dataclass(frozen=True)
class PackedLinear:
    """x @ weight.T + bias: the panels, N, and bias [N]."""

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
    """down(activation(gate(x)) * up(x)); `bias` is gate's, then up's."""

    pairs: Tensor
    width: int
    activation: str
    bias: Tensor | None
    down: PackedLinear


@dataclass(frozen=True)
class Substitute:
    """`forward` [..., K] -> [..., N] does what the module does, from `packed` instead of `weights`."""

    forward: Forward
    recipe: PackedLinear | RmsNorm | GatedMlp  # the same as numbers, for who fuses several modules
    packed: tuple[Tensor, ...] = ()
    sources: tuple[nn.Module, ...] = ()  # modules whose `weight` is not read any more
    unpack: Callable[[], list[Tensor]] = list  # their weights again, in the same order


def random_input(*shape: int) -> Tensor:
    """Normal random numbers from a generator of their own: the caller's random state stays."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max |expected|; infinite where shapes differ or a number is not finite."""
    if actual.shape != expected.shape or not (
        actual.isfinite().all() and expected.isfinite().all()
    ):
        return float("inf")
    scale = expected.abs().max().clamp_min(1e-30)
    return float((actual - expected).abs().max() / scale)


def agrees(actual: Forward, expected: Forward, *inputs: Tensor) -> bool:
    """Whether both give the same, within TOLERANCE, for each x. Raises `Unsuitable` where `expected` gives no tensor."""
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
