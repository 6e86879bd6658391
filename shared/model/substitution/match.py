"""Compares a module with its replacement by running both on random input. The module's name does not matter."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shared.model.cache import refuse_if_out_of_memory
from shared.model.weights.stored import Stored

TOLERANCE = 1e-5  # largest error relative to the largest output
# How often a large input is rounded otherwise, see `agrees`. Of one draw the few sums that count may hardly move.
ROUNDINGS = 4

_NO_SETTINGS = frozenset(["layer_idx", "training"])
_SMALL_BUFFER = 64  # numbers

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
class Norm:
    """x / rms(x) * (weight [D] + offset), or of weight [2, D] the layer norm with weights and biases. Without a weight,
    [0], x / rms(x)."""

    weight: Tensor
    eps: float
    offset: float


@dataclass(frozen=True)
class Activation:
    """See `shared.ops.activate`."""

    name: str


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
class Embedding:
    """Rows of a packed matrix."""


@dataclass(frozen=True)
class Router:
    """See `shared.ops.experts.choose_experts`."""

    packed: Tensor
    chosen: int
    normed: bool
    bias: Tensor | None


@dataclass(frozen=True)
class Experts:
    """Several MLPs, of which each token passes a few. `table`: of `shared.ops.experts.expert_table`, if they are gated
    MLPs of that `width`."""

    table: Tensor | None = None
    width: int = 0
    activation: str = ""


Recipe = PackedLinear | Norm | Activation | GatedMlp | Embedding | Router | Experts  # weights, to fuse several modules


@dataclass(frozen=True)
class Substitute:
    """`forward` [..., K] -> [..., N] computes what the module computes, from packed matrices instead of the module's
    weights.

    `form`: what was found out about the module. A module with the same `signature` computes the same function of its
    weights, so it gets its substitute by this form, without a comparison.
    """

    forward: Callable[..., Any]
    recipe: Recipe
    form: object
    sources: tuple[tuple[nn.Module, str], ...] = ()  # modules and their parameters that are no longer read
    packed: tuple[Stored, ...] = ()  # the weights of `sources`, in the same order


def signature(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same function of their parameters: same classes, shapes, settings and small
    buffers.

    Settings are all attributes but the layer's number.
    Objects among them count as equal only if they are the same object.
    """
    settings = tuple(
        (name, _setting(value))
        for name, value in sorted(vars(module).items())
        if name not in _NO_SETTINGS and not name.startswith("_")
    )
    parameters = tuple((n, tuple(p.shape), p.dtype) for n, p in module._parameters.items() if p is not None)
    buffers = tuple((n, _setting(b)) for n, b in module._buffers.items())
    hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    children = tuple((n, signature(c)) for n, c in module._modules.items() if c is not None)
    return type(module), settings, parameters, buffers, hooks, children


def _setting(value: object) -> Hashable:
    if isinstance(value, int | float | str | bytes | None):
        return value
    if isinstance(value, Tensor) and value.numel() <= _SMALL_BUFFER and not value.is_meta:
        return value.dtype, tuple(value.shape), tuple(value.flatten().tolist())
    if isinstance(value, tuple | list):
        return tuple(map(_setting, value))
    if isinstance(value, partial):
        return id(value.func), _setting(value.args), tuple((n, _setting(each)) for n, each in value.keywords.items())
    return id(value)


def random_input(*shape: int) -> Tensor:
    """Normal random numbers of the given shape, always the same. Does not change the global random state."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def of_all_sizes(x: Tensor) -> tuple[Tensor, ...]:
    """`x` and the same far smaller and far larger. Clamps show on large input, and what is added to it on small."""
    return x, x * 1e-4, x * 1e4


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max |expected|; infinite if the shapes differ or a number is not finite."""
    if actual.shape != expected.shape:
        return math.inf
    error, scale = _largest(actual - expected), _largest(expected)
    return error / max(scale, 1e-30) if math.isfinite(error) and math.isfinite(scale) else math.inf


def _largest(x: Tensor) -> float:
    """max |x|; NaN if there is one. Takes no memory: logits of a large vocabulary are compared."""
    return float(torch.stack(x.aminmax()).abs().max())


def agrees(actual: Forward, expected: Forward, *inputs: Tensor, clamps: bool = False) -> bool:
    """Whether both functions of rows agree within TOLERANCE on each input.
    Raises `Unsuitable` if `expected` fails or returns no tensor.

    `clamps`: whether outputs may be clamped within. Then those for the last input, a large one, may differ as those of
    `expected` do if its numbers are rounded otherwise: of wide matrices a few sums lie between the bounds, with an
    error that is large beside these. The input goes in ROUNDINGS times more, so both must do the same to these rows.

    The inputs go in together, because a weight that is still in its file is read and dequantised for each call.
    """
    if clamps:
        roundings = random_input(ROUNDINGS, *inputs[-1].shape).sign() * 1e-6
        inputs = *inputs, *(inputs[-1] + inputs[-1] * roundings)
    x = torch.cat(inputs)
    try:
        expected_output: Any = expected(x)
    except Exception as error:
        refuse_if_out_of_memory(error)
        raise Unsuitable(f"does not run on a random tensor: {type(error).__name__}") from error
    if not isinstance(expected_output, Tensor):
        raise Unsuitable("does not return a tensor")
    computed = actual(x)
    if computed.shape != expected_output.shape or len(expected_output) != len(x):
        return False
    own, theirs = (result.split([len(part) for part in inputs]) for result in (computed, expected_output))
    errors = [relative_error(*pair) for pair in zip(own, theirs, strict=True)]
    bounds = [TOLERANCE] * len(errors)
    if clamps:
        exact, *rounded = theirs[-1 - ROUNDINGS :]
        bound = 4 * max(relative_error(each, exact) for each in rounded)
        bounds[-1 - ROUNDINGS :] = [max(TOLERANCE, bound)] * (1 + ROUNDINGS)
    return all(error <= bound for error, bound in zip(errors, bounds, strict=True))
