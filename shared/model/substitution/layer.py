"""The forward of decoder layers that run as one op, and of consecutive ones that run together."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared.model import handed_on
from shared.model.cache_argument import LAYER_CACHE_ARGUMENTS, cache_among
from shared.model.substitution.plan import LayerPlan, stacked_plan
from shared.model.substitution.ragged import RaggedMask
from shared.model.substitution.trace import GIVEN, by_name

# Arguments that a layer may get. The fused layer reads all but the last two, which do not change the result.
_KNOWN = frozenset(
    [
        *LAYER_CACHE_ARGUMENTS,
        GIVEN,
        handed_on.ARGUMENT,
        "hidden_states",
        "attention_mask",
        "position_embeddings",
        "position_ids",
        "use_cache",
        "cache_position",
    ]
)


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
        self.layer_idx = plan.kv_layers[0]
        self._kind = type(layer)
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
        return run_plan(self.plan, *by_name(self._kind, args, kwargs))


def run_plan(plan: LayerPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The output [B, Q, D] of consecutive layers, of which the first is called with these arguments, and the others
    with the same but the state. For a call that the op does not support, does nothing and returns None."""
    cache = cache_among(kwargs)
    angles = kwargs.get("position_embeddings")
    has_angles = type(angles) is tuple and len(angles) == 2
    if not hasattr(cache, "layers_kv") or len(args) > 1 or (plan.rotates and not has_angles):
        return None
    if not (_KNOWN.issuperset(kwargs) or _only_supported_arguments(kwargs)):
        return None
    positions = kwargs.get("position_ids")
    if plan.query_scales is not None and not isinstance(positions, Tensor):
        return None
    own: Tensor | None = None
    if plan.weights.is_given:
        own = kwargs.get(GIVEN)
        if not isinstance(own, Tensor) or len(plan.kv_layers) > 1:
            return None
        own = own.flatten(0, 1)[:, None]
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    masks = _masks(kwargs.get("attention_mask"), hidden.shape[0])
    if masks is None:
        return None
    out = plan.run(hidden, [(angles, masks)], cache, positions=positions, per_layer_inputs=own)
    for name in plan.hands_on:
        kwargs[handed_on.ARGUMENT][name] = cache.seen(plan.kv_layers[0])
    return out


class LayerStack:
    """The fused layers of a model, of which consecutive ones can run as one op.

    `forwards`: of all layers. `kinds`: of each layer, what decides over its arguments beside the state.
    """

    def __init__(self, forwards: Sequence[Callable[..., Any]], kinds: Sequence[object]) -> None:
        owners = [getattr(forward, "__self__", None) for forward in forwards]
        self._layers = [owner if isinstance(owner, FusedLayer) else None for owner in owners]
        forms = [None if layer is None or layer.plan is None else layer.plan.form for layer in self._layers]
        # (first, end) -> the layers, and their plan as one.
        self._stacked: dict[tuple[int, int], tuple[list[FusedLayer], LayerPlan]] = {}
        # For each layer, the end of the longest run of layers of its form that begins with it, and of its kind, too.
        self._ends = _ends_of(forms)
        self._ends_of_kind = _ends_of(
            [None if form is None else (kind, form) for kind, form in zip(kinds, forms, strict=True)]
        )

    @property
    def scales_queries(self) -> bool:
        """Whether a layer scales its queries by their positions."""
        plans = (layer.plan for layer in self._layers if layer is not None)
        return any(plan is not None and plan.query_scales is not None for plan in plans)

    @property
    def all_fused(self) -> bool:
        return all(layer is not None for layer in self._layers)

    def plan(self, first: int, last: int, *, of_one_kind: bool) -> LayerPlan | None:
        """The plan of as many layers from `first` on, below `last`, as can run as one op.
        None if one of them must run its own forward. Hooks are not called."""
        end = min((self._ends_of_kind if of_one_kind else self._ends)[first], last)
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


def _ends_of(values: Sequence[object]) -> list[int]:
    """For each of `values`, the end of the longest run of equal ones that begins with it. None equals nothing."""
    ends = list(range(1, len(values) + 1))
    for index in reversed(range(len(values) - 1)):
        if values[index] is not None and values[index] == values[index + 1]:
            ends[index] = ends[index + 1]
    return ends


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
