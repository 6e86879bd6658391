"""Decoder layers of Hugging Face transformers as one op, found by recording which modules a layer runs.

A layer is a candidate for `shared.ops.layer.decoder_layers`, over the same packed weights, if all its modules run
kernels already (`linear`) and it calls them in the order of a pre-norm layer. The order alone does not decide:
`fused_layers` compares the bits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from shared.model.cache_argument import CACHE_ARGUMENTS, cache_among
from shared.model.substitution.attention import observed
from shared.model.substitution.match import Embedding, Experts, GatedMlp, PackedLinear, RmsNorm, Substitute, Unsuitable
from shared.model.substitution.ragged import RaggedMask
from shared.ops.layer import LayerKV, LayerWeights, decoder_layers, stacked

Call = tuple[tuple[Any, ...], dict[str, Any]]

# Arguments that a layer may get. The fused layer reads the cache and the three after it; the others do not change the
# result.
_KNOWN = frozenset(
    [
        *CACHE_ARGUMENTS,
        "hidden_states",
        "attention_mask",
        "position_embeddings",
        "position_ids",
        "use_cache",
        "cache_position",
    ]
)


# What a layer may do beside its modules, rotation and attention: move numbers, and add states. The fused layer would
# leave anything else out, and a clamp or a scale may have no effect on the tokens with which the layers are compared.
_MOVES = frozenset(("alias", "view", "_unsafe_view", "transpose", "slice", "split", "split_with_sizes", "expand"))
_MOVES |= {"unsqueeze", "clone", "copy_"}
_SUMS = ["add", "add"]


class _OtherOperations(TorchDispatchMode):
    """Notes the operations within it that are neither ours nor moves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace != "neap" and name not in _MOVES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Attention:
    """The sizes and parameters of one call of our attention."""

    num_heads: int
    num_kv_heads: int
    width: int
    value_width: int
    scaling: float
    softcap: float | None


_Event = PackedLinear | RmsNorm | GatedMlp | Embedding | Experts | _Attention


class FusedCache(Protocol):
    """A KV cache that fused layers can write to."""

    def layers_kv(self, keys: Tensor, values: Tensor, layers: tuple[int, ...]) -> LayerKV:
        """See `ContiguousCache.layers_kv`."""


@dataclass(frozen=True)
class LayerPlan:
    """The weights of consecutive layers, their numbers, and the form of their keys and values [*, Hkv, *, Dh] for the
    cache."""

    weights: LayerWeights
    indices: tuple[int, ...]
    keys_like: Tensor
    values_like: Tensor

    @property
    def form(self) -> tuple[object, ...]:
        """What plans must have in common to be stacked."""
        return self.weights.form, self.keys_like.shape, self.values_like.shape

    def run(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: FusedCache,
        masks: Sequence[Tensor] = (),
        captured: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """The layers' output [B, Q, D] for states [B, Q, D]. `masks` and `captured` as in `decoder_layers`."""
        keys, values = self.keys_like, self.values_like
        if hidden.shape[0] > 1:
            keys, values = (like.expand(hidden.shape[0], -1, -1, -1) for like in (keys, values))
        kv = cache.layers_kv(keys, values, self.indices)
        return decoder_layers(hidden, *angles, weights=self.weights, kv=kv, masks=masks, captured=captured)


def stacked_plan(plans: Sequence[LayerPlan]) -> LayerPlan:
    """The plans of consecutive layers of the same `form` as one."""
    indices = tuple(index for plan in plans for index in plan.indices)
    return replace(plans[0], weights=stacked([plan.weights for plan in plans]), indices=indices)


def watch(layer: nn.Module, substitutes: Mapping[nn.Module, Substitute], call: Call) -> tuple[list[_Event], list[str]]:
    """The replaced modules and the attention that `layer` runs in `call`, in order; and the names of other
    operations. Raises `Unsuitable` if the layer returns a tuple."""
    events: list[_Event] = []

    def note(event: _Event, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return forward(*args, **kwargs)

        return run

    def see(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any) -> None:
        if module in inside:
            scaling, softcap = kwargs.get("scaling"), kwargs.get("softcap")
            scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
            sizes = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
            events.append(_Attention(*sizes, scaling, softcap))

    inside = set(layer.modules())
    substituted = [(module, substitutes[module], module.forward) for module in inside if module in substitutes]
    try:
        for module, substitute, forward in substituted:
            module.forward = note(substitute.recipe, forward)
        with observed(see), _OtherOperations() as others:
            args, kwargs = call
            output = layer(*args, **kwargs)
    finally:
        for module, _, forward in substituted:
            module.forward = forward
    if not isinstance(output, Tensor):
        raise Unsuitable("returns more than its state")
    return events, others.names


def plan(layer: nn.Module, events: Sequence[_Event], others: Sequence[str]) -> LayerPlan:
    """What `watch` has recorded as one pre-norm layer. Raises `Unsuitable` if it is not one."""
    places = [index for index, event in enumerate(events) if isinstance(event, _Attention)]
    if len(places) != 1:
        raise Unsuitable(f"attends {len(places)} times through 'neap', not once")
    attention = events[places[0]]
    assert isinstance(attention, _Attention)
    before, after = events[: places[0]], events[places[0] + 1 :]
    norms = [event for event in before if isinstance(event, RmsNorm)]
    projections = [event for event in before if isinstance(event, PackedLinear)]
    match after:
        case [PackedLinear() as out, RmsNorm() as mlp_norm, GatedMlp() as mlp]:
            pass
        case _:
            raise Unsuitable(f"after attention runs {_named(after)}, not linear, norm, gated MLP")
    fits = len(norms) in (1, 3) and len(projections) in (1, 3) and before[0] is norms[0]
    if not fits or len(norms) + len(projections) != len(before):
        raise Unsuitable(f"before attention runs {_named(before)}, not norm, 1 or 3 linears")
    norms = [norms[0], mlp_norm, *norms[1:]]
    if len({(norm.eps, norm.offset) for norm in norms}) > 1:
        raise Unsuitable("has norms of different eps")
    if [*others] != _SUMS:
        more = sorted({*others} - {*_SUMS}) or others
        raise Unsuitable(f"beside its modules runs {', '.join(more)}")
    linears = [*projections, out]
    nothing = torch.empty(0)
    biases = [*(linear.bias for linear in linears), mlp.bias, mlp.down.bias]
    any_bias = any(bias is not None for bias in biases)
    weights = LayerWeights(
        [norm.weight for norm in norms],
        [*(linear.packed for linear in linears), mlp.gate, mlp.up, mlp.down.packed],
        [nothing if bias is None else bias for bias in biases] if any_bias else [],
        attention.num_heads,
        mlp.width,
        mlp.activation,
        norms[0].eps,
        norms[0].offset,
        attention.scaling,
        attention.softcap,
    )
    indices: set[object] = {getattr(module, "layer_idx", None) for module in layer.modules()}
    numbers = [index for index in indices if isinstance(index, int)]
    if len(numbers) != 1:
        raise Unsuitable(f"has {len(numbers)} different values of layer_idx, not one")
    keys, values = (
        torch.empty(1, attention.num_kv_heads, 0, width) for width in (attention.width, attention.value_width)
    )
    return LayerPlan(weights, (numbers[0],), keys, values)


def _named(events: Sequence[_Event]) -> str:
    return ", ".join(type(event).__name__.strip("_") for event in events) or "nothing"


class Hooks:
    """The forward hooks of some modules, as they are now and later."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._each = [hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        # The number of hooks that PyTorch had registered anywhere when there were last none here.
        self._none_until = -1

    def are_any(self) -> bool:
        """Whether there is one. After a pass the modules are in no cache of the processor, and looking at those of 30
        layers takes 50 us, so it is done only if PyTorch has registered a hook since."""
        registered: int = RemovableHandle.next_id
        if registered == self._none_until:
            return False
        if any(self._each):
            return True
        self._none_until = registered
        return False


class FusedLayer:
    """A layer's `forward`: one op for passes over contiguous KV caches, and the layer's own forward for all others.
    The bits are the same."""

    def __init__(self, layer: nn.Module, plan: LayerPlan) -> None:
        self.layer_idx = plan.indices[0]
        self._original = layer.forward
        self.plan: LayerPlan | None = plan
        self.modules = [module for module in layer.modules() if module is not layer]
        # If there are any, the op is not used, because it would not call them.
        self._hooks = Hooks(self.modules)

    def disable(self) -> None:
        """Makes all later calls run the layer's own forward, and releases the weights."""
        self.plan = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes and returns the same as the layer's own forward."""
        out = self.fused(args, kwargs)
        return self._original(*args, **kwargs) if out is None else out

    def fused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The layer's output [B, Q, D]. For a call that the op does not support, does nothing and returns None."""
        if self.plan is None or self._hooks.are_any():
            return None
        return run_plan(self.plan, args, kwargs)


def run_plan(plan: LayerPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The output [B, Q, D] of consecutive layers, of which the first is called with these arguments, and the others
    with the same but the state. For a call that the op does not support, does nothing and returns None."""
    cache = cache_among(kwargs)
    angles = kwargs.get("position_embeddings")
    if not hasattr(cache, "layers_kv") or len(args) > 1 or type(angles) is not tuple or len(angles) != 2:
        return None
    if not (_KNOWN.issuperset(kwargs) or _only_supported_arguments(kwargs)):
        return None
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    masks = _masks(kwargs.get("attention_mask"), hidden.shape[0])
    return None if masks is None else plan.run(hidden, angles, cache, masks)


class LayerStack:
    """The fused layers of a model, of which consecutive ones can run as one op.

    `forwards`: of all layers. `kinds`: of each layer, what decides over its arguments beside the state; layers of
    different kinds are not run together.
    """

    def __init__(self, forwards: Sequence[Callable[..., Any]], kinds: Sequence[object]) -> None:
        owners = [getattr(forward, "__self__", None) for forward in forwards]
        self._layers = [owner if isinstance(owner, FusedLayer) else None for owner in owners]
        forms = [
            (kind, layer.plan.form) if layer is not None and layer.plan is not None else None
            for layer, kind in zip(self._layers, kinds, strict=True)
        ]
        # (first, end) -> the layers, and their plan as one.
        self._stacked: dict[tuple[int, int], tuple[list[FusedLayer], LayerPlan]] = {}
        # For each layer, the end of the longest run of layers of its form that begins with it.
        self._ends = list(range(1, len(forms) + 1))
        for index in reversed(range(len(forms) - 1)):
            if forms[index] is not None and forms[index] == forms[index + 1]:
                self._ends[index] = self._ends[index + 1]

    @property
    def all_fused(self) -> bool:
        return all(layer is not None for layer in self._layers)

    def plan(self, first: int, last: int) -> LayerPlan | None:
        """The plan of as many layers from `first` on, below `last`, as can run as one op.
        None if one of them must run its own forward. Hooks are not called."""
        end = min(self._ends[first], last)
        known = self._stacked.get((first, end))
        if known is None:
            layers = [layer for layer in self._layers[first:end] if layer is not None]
            plans = [layer.plan for layer in layers if layer.plan is not None]
            if len(plans) < end - first:
                return None
            known = self._stacked[first, end] = layers, stacked_plan(plans)
        layers, plan = known
        for layer in layers:
            if layer.plan is None:
                self._stacked.clear()  # it would keep the weights of a layer that has been disabled
                return None
        return plan


def _only_supported_arguments(kwargs: dict[str, Any]) -> bool:
    others = (kwargs[name] for name in kwargs.keys() - _KNOWN)
    return all(value is None or value is False for value in others)


def _masks(mask: object, rows: int) -> Sequence[Tensor] | None:
    """Per sequence a bool mask, or an empty tensor if it is causal.
    () if all are causal, None if the op does not support the mask."""
    if mask is None:
        return ()
    if isinstance(mask, RaggedMask):
        return mask.masks if any(row_mask.numel() for row_mask in mask.masks) else ()
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 4:
        each: tuple[Tensor, ...] = torch.split(mask.expand(rows, -1, -1, -1), 1)
        return each
    return None
