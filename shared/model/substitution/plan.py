"""A decoder layer of Hugging Face transformers as one op, made from what a pass through the layer has shown.

A layer is a candidate for `shared.ops.layer.decoder_layers`, over the same packed weights, if all its modules run
kernels already (`linear`) and it calls them as a pre-norm layer does: their order, and which of them reads what another
one has made, decide over the op's parts. They alone do not prove it: `fused_layers` compares the bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shared.model.substitution.match import Activation, Experts, GatedMlp, Norm, PackedLinear, Router, Unsuitable
from shared.model.substitution.trace import Attention, Event, OfPositions, Trace
from shared.ops.layer import LayerInputs, LayerKV, LayerWeights, decoder_layers, stacked

Angles = tuple[Tensor, Tensor]
# What layers of one kind get beside the state: cosines and sines [B or 1, Q, R], if any, and a mask per sequence.
Given = tuple[Angles | None, Sequence[Tensor]]

FLOAT_BYTES = 4
_NOTHING = torch.empty(0)


class FusedCache(Protocol):
    """A KV cache that fused layers can write to."""

    def layers_kv(self, likes: Sequence[tuple[Tensor, Tensor]], layers: tuple[int, ...]) -> LayerKV:
        """See `ContiguousCache.layers_kv`."""


@dataclass(frozen=True)
class LayerPlan:
    """The weights of consecutive layers, the numbers of the layers whose keys and values they attend to, their own but
    where `weights.reads_kv`, and the form of these [*, Hkv, *, Dh] for the cache. `rotates`: whether queries and keys
    are rotated; `half_angles`: how many angles are given, if once for both halves of a head, and 0 if for each.
    `query_scales`: what multiplies the rotated queries. `hands_on`: the names by which later layers get the keys and
    values of a single layer."""

    weights: LayerWeights
    kv_layers: tuple[int, ...]
    likes: tuple[tuple[Tensor, Tensor], ...]
    rotates: bool
    half_angles: int
    query_scales: OfPositions | None = None
    hands_on: frozenset[Any] = frozenset()

    @property
    def form(self) -> tuple[object, ...]:
        """What plans must have in common to be stacked."""
        return self.weights.form, self.rotates, self.half_angles, self.query_scales

    def run(
        self,
        hidden: Tensor,
        given: Sequence[Given],
        cache: FusedCache,
        kinds: Sequence[int] = (),
        captured: dict[int, Tensor] | None = None,
        positions: Tensor | None = None,
        per_layer_inputs: Tensor | None = None,
    ) -> Tensor:
        """The layers' output [B, Q, D] for states [B, Q, D]. `given`, by `kinds`, `captured` and `per_layer_inputs` as
        in `decoder_layers`. `positions` [B or 1, Q] int64: those of the tokens, which queries may be scaled by."""
        likes: Sequence[tuple[Tensor, Tensor]] = self.likes
        if (rows := hidden.shape[0]) > 1:
            likes = [(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)) for keys, values in likes]
        inputs = [LayerInputs(*self._angles(angles, hidden), masks) for angles, masks in given]
        kv = cache.layers_kv(likes, self.kv_layers)
        more: dict[str, Tensor] = {}
        if self.weights.is_given:
            assert per_layer_inputs is not None
            more["per_layer_inputs"] = per_layer_inputs
        if self.query_scales is not None:
            assert positions is not None
            more["query_scales"] = self.query_scales.of(positions).flatten()
        return decoder_layers(hidden, inputs, weights=self.weights, kv=kv, kinds=kinds, captured=captured, **more)

    def _angles(self, angles: Angles | None, hidden: Tensor) -> Angles:
        """What the op rotates by."""
        if angles is None or not self.rotates:
            return hidden[:1, :, :0], hidden[:1, :, :0]
        if self.half_angles and angles[0].shape[2] == self.half_angles:
            cos, sin = angles
            return cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)
        return angles


def stacked_plan(plans: Sequence[LayerPlan]) -> LayerPlan:
    """The plans of consecutive layers of the same `form` as one."""
    kv_layers = tuple(layer for plan in plans for layer in plan.kv_layers)
    likes = tuple(like for plan in plans for like in plan.likes)
    return replace(plans[0], weights=stacked([plan.weights for plan in plans]), kv_layers=kv_layers, likes=likes)


def plan(layer: nn.Module, trace: Trace, handed_on_by: dict[Any, int]) -> LayerPlan:
    """The layer that `trace` shows as one pre-norm layer. `handed_on_by`: the numbers of earlier layers by the names
    under which they hand on keys and values; this one is added. Raises `Unsuitable` if it is not one."""
    indices: set[object] = {getattr(module, "layer_idx", None) for module in layer.modules()}
    numbers = [index for index in indices if isinstance(index, int)]
    if len(numbers) != 1:
        raise Unsuitable(f"has {len(numbers)} different values of layer_idx, not one")
    [number] = numbers
    handed_on_by |= dict.fromkeys(trace.hands_on, number)
    events, state = trace.events, trace.state
    places = [index for index, event in enumerate(events) if isinstance(event.what, Attention)]
    if len(places) != 1:
        raise Unsuitable(f"attends {len(places)} times through 'neap', not once")
    attention = events[places[0]].what
    assert isinstance(attention, Attention)
    before, after = events[: places[0]], events[places[0] + 1 :]
    own = _before(before, trace)
    end, others = _end(after, trace)
    rest = _rest(others, {norm.made: norm for norm in own.of_state})
    input_norm = next((norm for norm in own.of_state if norm.made == own.made[0].read), own.of_state[0])
    own_norm = None if rest.norm is input_norm else rest.norm
    if any(norm not in (input_norm, own_norm) for norm in own.of_state):
        raise Unsuitable("has a norm that its parts do not read")
    each_norm = [input_norm, own_norm, *[*own.of_heads, None, None][:2], rest.attended_norm, rest.output_norm]
    recipes = [None if norm is None else _norm_of(norm) for norm in each_norm]
    forms = {(norm.eps, norm.offset) for norm in (*recipes, end.norm) if norm is not None}
    if len(forms) > 1 or any(_norm_of(norm).eps != _norm_of(input_norm).eps for norm in own.of_values):
        raise Unsuitable("has norms of different eps")
    scales = [scale for start, scale in trace.scaled if start == own.made[0].made]
    beside = [*trace.others, *["mul"] * (len(trace.scaled) - len(scales[:1]))]
    if trace.query_scales and [*trace.query_scales] != [events[places[0]].read]:
        raise Unsuitable("scales more than its queries by their positions")
    sums = ["add"] * (2 + trace.is_given)
    if beside != sums:
        raise Unsuitable(f"beside its modules runs {', '.join(sorted({*beside} - {*sums}) or beside)}")
    projections = [event.what for event in own.made if isinstance(event.what, PackedLinear)]
    if len(projections) == 2:  # values are made as keys are
        projections.append(projections[1])
    absent: list[PackedLinear | None] = [None] * (3 - len(projections))
    linears, mlp = [*projections, *absent, rest.out], rest.mlp
    if end.norm is not None and end.activation != mlp.activation:
        raise Unsuitable("has two activations")
    biases = [
        *(None if linear is None else linear.bias for linear in linears),
        mlp.bias,
        mlp.down.bias,
        attention.sinks,
    ]
    packed = [*(None if linear is None else linear.packed for linear in linears), mlp.gate, mlp.up, mlp.down.packed]
    weights = LayerWeights(
        _filled([None if norm is None else norm.weight for norm in recipes]),
        _filled(packed),
        _filled(biases) if any(bias is not None for bias in biases) else [],
        attention.num_heads,
        [mlp.width],
        mlp.activation,
        *forms.pop(),
        attention.scaling,
        attention.softcap,
        places=_places(trace, attention, own.made[0]) if absent and not trace.reads_kv else (),
        query_scale=scales[0] if scales else 1.0,
        parallel_mlp=rest.norm.read == state,
        experts_per_token=rest.router.chosen if rest.router else 0,
        norm_shares=rest.router is not None and rest.router.normed,
        norm_values=bool(own.of_values),
        reads_kv=[bool(trace.reads_kv)],
        ends=end.tensors if any(each.numel() for each in end.tensors) else [],
    )
    keys, values = (
        torch.empty(1, attention.num_kv_heads, 0, width) for width in (attention.width, attention.value_width)
    )
    return LayerPlan(
        weights,
        (next((handed_on_by[name] for name in trace.reads_kv), number),),
        ((keys, values),),
        trace.rotates,
        trace.half_angles,
        next(iter(trace.query_scales.values()), None),
        trace.hands_on,
    )


@dataclass(frozen=True)
class _Before:
    """What precedes attention: norms of the state, what is projected, and norms of heads, those without a weight of
    values."""

    of_state: list[Event]
    made: list[Event]
    of_heads: list[Event]
    of_values: list[Event]


def _before(before: Sequence[Event], trace: Trace) -> _Before:
    norms = [event for event in before if isinstance(event.what, Norm)]
    made = [event for event in before if isinstance(event.what, PackedLinear)]
    of_state = [norm for norm in norms if norm.read == trace.state]
    others = [norm for norm in norms if norm.read != trace.state]
    of_values = [norm for norm in others if not _norm_of(norm).weight.numel()]
    of_heads = [norm for norm in others if _norm_of(norm).weight.numel()]
    if trace.reads_kv:
        fits = len(of_heads) < 2 and len(made) == len(trace.reads_kv) == 1 and not of_values
    else:
        fits = len(of_heads) in (0, 2) and len(made) in (1, 2, 3) and len(of_values) < 2
    if not of_state or not fits or len(norms) + len(made) < len(before):
        raise Unsuitable(f"before attention runs {_named(before)}, not norm, 1 to 3 linears")
    return _Before(of_state, made, of_heads, of_values)


@dataclass(frozen=True)
class _End:
    """See `LayerWeights.ends`. `norm`: that of them, if there is one."""

    tensors: list[Tensor]
    norm: Norm | None = None
    activation: str = ""


def _end(after: Sequence[Event], trace: Trace) -> tuple[_End, Sequence[Event]]:
    """What follows the MLP, and what runs between attention and that."""
    if len(trace.scales) > 1:
        raise Unsuitable(f"multiplies by {len(trace.scales)} numbers, not by one at its end")
    scale = _filled(trace.scales[:1] or [None])
    if not trace.is_given:
        return _End([*[_NOTHING] * 3, *scale]), after
    match [event.what for event in after[-4:]]:
        case [PackedLinear(bias=None) as gate, Activation() as act, PackedLinear(bias=None) as out, Norm() as norm]:
            return _End([gate.packed, out.packed, norm.weight, *scale], norm, act.name), after[:-4]
    raise Unsuitable(f"what it is given is multiplied by something else than a gate: {_named(after)}")


@dataclass(frozen=True)
class _Rest:
    """What follows attention. `norm`: what the MLP reads. `router`: that of experts, which are `mlp` then."""

    out: PackedLinear
    attended_norm: Event | None
    norm: Event
    mlp: GatedMlp
    output_norm: Event | None
    router: Router | None


def _rest(after: Sequence[Event], of_state: dict[int, Event]) -> _Rest:
    """`after`: what runs after attention. `of_state`: norms of the layer's state that ran before, by what they made."""
    out, left = (after[0], [*after[1:]]) if after else (None, [])

    def norm(last: bool = False) -> Event | None:
        return left.pop(-last) if left and isinstance(left[-last].what, Norm) else None

    attended_norm = norm() if out and left and left[0].read == out.made else None
    before_mlp, output_norm = norm(), norm(last=True)
    before_mlp = before_mlp or (of_state.get(left[0].read) if left else None)
    chosen: Router | None = None
    match [event.what for event in left]:
        case [GatedMlp() as mlp]:
            pass
        case [PackedLinear() as inner, Activation() as act, PackedLinear() as down]:
            mlp = GatedMlp(inner.packed, _NOTHING, inner.out_features, act.name, inner.bias, down)
        case [Router() as chosen, Experts(table=Tensor() as table, width=width, activation=name)]:
            mlp = GatedMlp(table, chosen.packed, width, name, chosen.bias, PackedLinear(_NOTHING, 0, None))
        case _:
            out = None
    if out is None or before_mlp is None or not isinstance(out.what, PackedLinear):
        raise Unsuitable(f"after attention runs {_named(after)}, not linear, norm, MLP or experts")
    return _Rest(out.what, attended_norm, before_mlp, mlp, output_norm, chosen)


def _places(trace: Trace, attention: Attention, made: Event) -> tuple[int, ...]:
    """Where the heads of queries, keys and values are in the rows [N] that one projection has made: see
    `LayerWeights`."""
    assert isinstance(made.what, PackedLinear)
    sizes = {
        "q": (attention.num_heads, attention.width),
        "k": (attention.num_kv_heads, attention.width),
        "v": (attention.num_kv_heads, attention.value_width),
    }
    places: list[int] = []
    end = 0
    for name, (count, width) in sizes.items():
        view = trace.views.get(name)
        at = -1 if view is None else (view.start - made.made) // FLOAT_BYTES
        places += [at, max(view.head, width)] if view and 0 <= at < made.what.out_features else [end, width]
        end += count * width
    return tuple(places)


def _norm_of(event: Event) -> Norm:
    assert isinstance(event.what, Norm)
    return event.what


def _filled(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [_NOTHING if tensor is None else tensor for tensor in tensors]


def _named(events: Sequence[Event]) -> str:
    return ", ".join(type(event.what).__name__ for event in events) or "nothing"
