"""Replacements of linear layers, norms, activations and gated MLPs by ops over packed weights.

Each function takes a module and returns its `Substitute`, or raises `Unsuitable` with the reason.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared import ops
from shared.model.substitution.match import (
    Activation,
    Embedding,
    GatedMlp,
    Norm,
    PackedLinear,
    Substitute,
    Unsuitable,
    agrees,
    of_all_sizes,
    random_input,
)
from shared.model.weights.composed import Joined
from shared.model.weights.lazy import LazyWeight, lazy
from shared.model.weights.stored import ALL_ROWS, Packed, Stored

INPUT_ROWS = 3
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")


def _bias(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return bias.detach() if isinstance(bias, Tensor) else None


def own_matrix(module: nn.Module) -> Tensor:
    """The module's weight, a float32 matrix on the CPU or a `LazyWeight`. Raises `Unsuitable`."""
    return packable(getattr(module, "weight", None))


def packable(weight: object) -> Tensor:
    """`weight`, if it is such a matrix. Raises `Unsuitable`."""
    if not isinstance(weight, Tensor):
        raise Unsuitable("has no two-dimensional weight")
    # Other packages keep quantised weights in tensors of their own that claim to be float32.
    if type(weight) not in (Tensor, nn.Parameter, LazyWeight):
        raise Unsuitable(f"weight is a {type(weight).__name__}")
    if weight.dim() != 2 or weight.numel() == 0:
        raise Unsuitable("has no two-dimensional weight")
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise Unsuitable(f"weight is {weight.dtype} on {weight.device}")
    return weight.detach()


def pack_matrix(weight: Tensor, *, transposed: bool = False, rows: slice = ALL_ROWS) -> Packed:
    """The matrix [N, K] that a module holds as `weight`, or as its transpose, or some of its rows."""
    stored = lazy(weight)
    if stored is None:
        matrix = (weight.T if transposed else weight)[rows]
        count, columns = matrix.shape
        return Packed(ops.pack_linear(matrix), count, columns, "float32", transposed=transposed)
    if stored.transposed == transposed:
        packed, form, num_rows, columns = (stored.pack(rows), stored.format, stored.rows, stored.columns)
    else:
        (packed, form), num_rows, columns = stored.pack_transpose(rows), stored.columns, stored.rows
    count = len(range(*rows.indices(num_rows)))
    return Packed(packed, count, columns, form, transposed=transposed)


def linear(module: nn.Module, *, transposed: bool = False, form: object | None = None) -> Substitute:
    """A module that computes x @ weight.T + bias. `transposed`: whether the weight is stored as [K, N], as in GPT-2's
    Conv1D."""
    weight = pack_matrix(own_matrix(module), transposed=transposed)
    packed, out_features, bias = weight.packed, weight.rows, _bias(module)
    forward = partial(ops.packed_linear, packed=packed, out_features=out_features, bias=bias)
    x = random_input(INPUT_ROWS, weight.columns)
    # Its forward alone: hooks go on around the kernel.
    if form is None and not agrees(forward, module.forward, *of_all_sizes(x)):
        raise Unsuitable("does more than x @ weight.T + bias")
    recipe = PackedLinear(packed, out_features, bias)
    return Substitute(forward, recipe, "linear", ((module, "weight"),), (weight,))


def embedding(module: nn.Module, *, form: object | None = None) -> Substitute:
    """A module whose result is rows of its weight and nothing else."""
    weight = pack_matrix(own_matrix(module))
    packed = weight.packed

    def forward(ids: Tensor) -> Tensor:
        return ops.packed_rows(packed, ids)

    if form is None:
        ids = torch.arange(min(weight.rows, INPUT_ROWS))[None]
        if not torch.equal(forward(ids), module(ids)):
            raise Unsuitable("does more than a look-up of rows")
    return Substitute(forward, Embedding(), "embedding", ((module, "weight"),), (weight,))


def norm(module: nn.Module, *, form: object | None = None) -> Substitute:
    """A module that computes x / sqrt(mean(x^2) + eps) * (weight + offset), with offset 0 or 1, or the layer norm with
    its weight and its bias, if it has one. eps is one of the module's attributes.

    `form`: (eps, offset, whether it is a layer norm), if they are known.
    """
    parameters = dict(module.named_parameters())
    weight, bias = parameters.get("weight"), parameters.get("bias")
    vectors = all(vector.dim() == 1 and vector.dtype == torch.float32 for vector in parameters.values())
    if weight is None or not vectors or len(parameters) != (1 if bias is None else 2):
        raise Unsuitable("has other parameters than a float32 weight and bias, each a vector")
    frozen = weight.detach()
    both = torch.stack([frozen, torch.zeros_like(frozen) if bias is None else bias.detach()])
    if isinstance(form, tuple):
        return _norm(both if form[2] else frozen, *form)
    x = random_input(INPUT_ROWS, 2, frozen.shape[0])
    # Small input reveals eps. Shifted input reveals whether the mean is subtracted.
    inputs = (*of_all_sizes(x), x + 1)
    forms = [(frozen, eps, offset, False) for eps in _epsilons(module) for offset in (0.0, 1.0) if bias is None]
    for candidate in (*forms, *((both, eps, 0.0, True) for eps in _epsilons(module))):
        substitute = _norm(*candidate)
        if agrees(substitute.forward, module, *inputs):
            return substitute
    raise Unsuitable("is neither an RMS norm nor a layer norm")


def plain_norm(module: nn.Module, *, form: object | None = None) -> Substitute:
    """A module without parameters that computes x / sqrt(mean(x^2) + eps), of any width. eps is one of its attributes.
    `form`: eps, if it is known."""
    inputs = of_all_sizes(random_input(INPUT_ROWS, 48))
    for eps in (form,) if isinstance(form, float) else _epsilons(module):

        def forward(x: Tensor, eps: float = eps) -> Tensor:
            return ops.rms_norm(x, _ones(x.shape[-1]), eps, 0.0)

        if form is not None or agrees(forward, module, *inputs):
            return Substitute(forward, Norm(torch.empty(0), eps, 0.0), eps)
    raise Unsuitable("is no RMS norm without a weight")


def _epsilons(module: nn.Module) -> list[float]:
    """The attributes of a norm that may be its eps."""
    return sorted({v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1})


@functools.lru_cache(maxsize=16)
def _ones(width: int) -> Tensor:
    return torch.ones(width)


def _norm(weight: Tensor, eps: float, offset: float, centred: bool) -> Substitute:
    if centred:
        forward = partial(ops.layer_norm, weight=weight[0], bias=weight[1], eps=eps)
    else:
        forward = partial(ops.rms_norm, weight=weight, eps=eps, weight_offset=offset)
    return Substitute(forward, Norm(weight, eps, offset), (eps, offset, centred))


def activation(module: nn.Module, *, form: object | None = None) -> Substitute:
    """A module without parameters that is one of our activations. `form`: its name, if it is known."""
    x = random_input(INPUT_ROWS, 64)
    for name in (form,) if isinstance(form, str) else ACTIVATIONS:
        forward = partial(ops.activate, activation=name)
        if form is not None or agrees(forward, module, *of_all_sizes(x)):
            return Substitute(forward, Activation(name), name)
    raise Unsuitable("is none of the activations that have a kernel")


@dataclass(frozen=True)
class MlpForm:
    """The numbers of gate, up and down among a module's linear layers; or of gate and up in one, and down.
    And the activation."""

    order: tuple[int, ...]
    activation: str

    def layers(self, module: nn.Module) -> tuple[nn.Linear, ...]:
        linears = _linears(module)
        return tuple(linears[index] for index in self.order)


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [child for child in module.children() if type(child) is nn.Linear]


def _forms(num_linears: int) -> Iterator[MlpForm]:
    for activation in ("silu", "gelu_tanh"):
        for order in permutations(range(num_linears)):
            yield MlpForm(order, activation)


def _plain_mlp(form: MlpForm, module: nn.Module, x: Tensor) -> Tensor | None:
    """What a gated MLP of this form computes. None if the shapes of its layers do not fit."""
    *first, down = form.layers(module)
    weights = [layer.weight for layer in first]
    shapes = [tuple(weight.shape) for weight in weights]
    inner, width = down.weight.shape[1], down.weight.shape[0]
    expected_shapes = [(inner, width)] * 2 if len(first) == 2 else [(2 * inner, width)]
    if shapes != expected_shapes:
        return None
    gate, up = torch.cat([F.linear(x, f.weight, f.bias) for f in first], -1).chunk(2, -1)
    acted = F.silu(gate) if form.activation == "silu" else F.gelu(gate, approximate="tanh")
    return F.linear(acted * up, down.weight, down.bias)


def _find_form(module: nn.Module, x: Tensor) -> MlpForm:
    def computes(form: MlpForm) -> bool:
        def plain(x: Tensor) -> Tensor:
            computed = _plain_mlp(form, module, x)
            return x.new_empty(0) if computed is None else computed

        return agrees(plain, module, *of_all_sizes(x))

    mlp_form = next(filter(computes, _forms(len(_linears(module)))), None)
    if mlp_form is None:
        raise Unsuitable("is not down(activation(gate(x)) * up(x))")
    return mlp_form


def _joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    parts: list[Tensor] = [torch.zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    return torch.cat(parts).detach()


def gated_mlp(module: nn.Module, *, form: object | None = None) -> Substitute:
    """A module that computes down(activation(gate(x)) * up(x)). Gate and up may be two layers or one.
    `form`: a `MlpForm`, if it is known."""
    linears = _linears(module)
    if len(linears) not in (2, 3) or list(module.parameters(recurse=False)):
        raise Unsuitable("does not have the layers of a gated MLP")
    if any(child._forward_hooks or child._forward_pre_hooks for child in linears):
        raise Unsuitable("has hooks on its layers, which a fused kernel would not call")
    for layer in linears:
        own_matrix(layer)
    x = random_input(INPUT_ROWS, linears[0].in_features)
    mlp_form = form if isinstance(form, MlpForm) else _find_form(module, x)
    layers = mlp_form.layers(module)
    *first, last = layers
    width, hidden = last.in_features, last.out_features
    if len(first) == 2:
        gate, up = (pack_matrix(layer.weight.detach()) for layer in first)
        held: tuple[Stored, ...] = (gate, up)
    else:
        rows = (slice(0, width), slice(width, None))
        gate, up = (pack_matrix(first[0].weight.detach(), rows=half) for half in rows)
        held = (Joined([gate, up]),)
    down = pack_matrix(last.weight.detach())
    bias, down_bias, activation = _joined_bias(first), _bias(last), mlp_form.activation
    packed_gate, packed_up, packed_down = gate.packed, up.packed, down.packed

    def forward(x: Tensor) -> Tensor:
        acted = ops.packed_gated_linear(x, packed_gate, packed_up, width, activation, bias)
        return ops.packed_linear(acted, packed_down, hidden, down_bias)

    if form is None and not agrees(forward, module, *of_all_sizes(x)):
        raise Unsuitable("its fused form differs by more than the tolerance")
    recipe = GatedMlp(packed_gate, packed_up, width, activation, bias, PackedLinear(packed_down, hidden, down_bias))
    sources = tuple((layer, "weight") for layer in layers)
    return Substitute(forward, recipe, mlp_form, sources, (*held, down))
