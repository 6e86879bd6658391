"""Whole pre-norm decoder layers as one op. It gives the same bits as the kernels of their modules, without the overhead
between them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from shared.ops import begin_call

_CAUSAL = torch.empty(0, dtype=torch.bool)


class TensorTable:
    """Tensors that an op takes as one argument: `table` tells where they are. None of them may be resized.

    To hand over a list of 300 tensors costs half a millisecond per call.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        begin_call()
        self.tensors = tuple(tensors)  # kept alive, because the table has their addresses
        self.table: Tensor = torch.ops.neap.tensor_table.default(self.tensors)


@dataclass(frozen=True)
class LayerWeights:
    """The weights of `num_layers` consecutive layers; the lists have those of one layer after those of another.

    An empty tensor stands for what a layer does not have. `norms` of each layer: before attention, before the MLP, of
    query and of key heads [Dh], of what attention and of what the MLP adds. They are RMS norms [D], or layer norms [2,
    D]: weights, then biases. `packed`: queries, keys, values, out, gate, up, down. The first one may make keys and
    values, too; `places` tells where: for queries, keys and values the place of head 0 and how far heads are apart, one
    after another if it is empty. Without `up` the MLP is plain: down(activation(gate(x))). `biases`: in the same order,
    but one for gate and up together (gate's, then up's), and last the sinks of attention [num_heads] as in
    `shared.ops.contiguous_attention`; an empty list if there are none at all. What is not a list is the same
    in all layers. `query_scale`: queries are multiplied by it before their norm. `parallel_mlp`: whether the MLP reads
    the norm of x, that before attention if it has none of its own.

    With `experts_per_token` the MLP is experts: `gate` is an `expert_table`, `up` their router, whose bias has the
    place of gate's, there is no `down`, and `norm_shares` is what `shared.ops.experts.choose_experts` takes as
    `normed`.

    `intermediates`: the width of each layer's MLP. `norm_values`: whether each head's values are divided by their RMS.
    `reads_kv`: of each layer, whether it attends to keys and values that an earlier layer has written and makes none,
    so that its first matrix makes queries alone; empty if none does. `ends`: what follows the MLP, of each layer a gate
    [P, D], a matrix [D, P], a norm [D] and a scale [1]: h becomes scale * (h + norm(matrix(activation(gate(h)) *
    given))); an empty list if there are none at all. A layer may have the scale alone, if what its MLP adds is normed.
    """

    norms: Sequence[Tensor]
    packed: Sequence[Tensor]
    biases: Sequence[Tensor]
    num_heads: int
    intermediates: Sequence[int]
    activation: str
    eps: float
    weight_offset: float
    scaling: float
    softcap: float | None = None
    places: Sequence[int] = ()
    query_scale: float = 1.0
    parallel_mlp: bool = False
    experts_per_token: int = 0
    norm_shares: bool = False
    norm_values: bool = False
    reads_kv: Sequence[bool] = ()
    ends: Sequence[Tensor] = ()
    num_layers: int = 1

    @cached_property
    def is_given(self) -> bool:
        """Whether layers are given something of each token."""
        return any(gate.numel() for gate in self.ends[::4])

    @cached_property
    def tables(self) -> tuple[TensorTable, TensorTable, TensorTable]:
        """Norms, packed matrices and biases."""
        return TensorTable(self.norms), TensorTable(self.packed), TensorTable(self.biases)

    @cached_property
    def end_table(self) -> TensorTable | None:
        return TensorTable(self.ends) if self.ends else None

    @property
    def form(self) -> tuple[object, ...]:
        """What weights must have in common to be stacked."""
        lengths = len(self.norms), len(self.packed), len(self.biases), len(self.ends), len(self.reads_kv)
        sizes = self.num_heads, self.activation, self.num_layers, self.norm_values
        numbers = self.eps, self.weight_offset, self.scaling, self.softcap, self.query_scale
        return (
            *lengths,
            *sizes,
            *numbers,
            tuple(self.places),
            self.parallel_mlp,
            self.experts_per_token,
            self.norm_shares,
        )


def stacked(parts: Sequence[LayerWeights]) -> LayerWeights:
    """The weights of consecutive layers, which must have the same `form`, as those of one call."""
    if len({part.form for part in parts}) != 1:
        raise ValueError("layers of different forms cannot be stacked")
    return replace(
        parts[0],
        norms=list(chain.from_iterable(part.norms for part in parts)),
        packed=list(chain.from_iterable(part.packed for part in parts)),
        biases=list(chain.from_iterable(part.biases for part in parts)),
        ends=list(chain.from_iterable(part.ends for part in parts)),
        intermediates=list(chain.from_iterable(part.intermediates for part in parts)),
        reads_kv=list(chain.from_iterable(part.reads_kv for part in parts)),
        num_layers=sum(part.num_layers for part in parts),
    )


class LayerKV(NamedTuple):
    """Where the new keys and values are written.

    Per sequence: its tensors [1, Hkv, S, Dh], one per layer, the first position of its new tokens, and their number.
    """

    keys: Sequence[TensorTable]
    values: Sequence[TensorTable]
    bases: list[int]
    counts: list[int]


class LayerInputs(NamedTuple):
    """What layers of one kind are given beside the state: angles [B or 1, Q, R], and a mask per sequence as in
    `shared.ops.ragged_contiguous_attention`. Without masks all queries attend causally."""

    cos: Tensor
    sin: Tensor
    masks: Sequence[Tensor] = ()


# The steps that `profile_layers` tells apart. "place": head norms, rotary positions, and writing keys and values.
STEPS = ("norms", "matmuls", "place", "attention")


def profile_layers(is_on: bool) -> dict[str, float]:
    """Seconds of each of STEPS in `decoder_layers` since the last call, and measures or not from now on.
    No layer may be running.

    One thread's clock: a step ends when all threads have ended it, so their waiting for each other counts.
    """
    begin_call()
    seconds: Tensor = torch.ops.neap.profile_layers.default(is_on)
    return dict(zip(STEPS, seconds.tolist(), strict=True))


def decoder_layers(
    x: Tensor,
    inputs: Sequence[LayerInputs],
    weights: LayerWeights,
    kv: LayerKV,
    kinds: Sequence[int] = (),
    captured: dict[int, Tensor] | None = None,
    query_scales: Tensor | None = None,
    per_layer_inputs: Tensor | None = None,
) -> Tensor:
    """Each layer: h = x + out(attention(qkv(norm(x)))), then h + down(activation(gate(norm(h))) * up(norm(h))): x [B,
    Q, D] -> [B, Q, D]. A parallel MLP reads x in place of h. `LayerWeights` says what else may differ.

    The output of one layer is the x of the next. The tokens of x are those of all sequences, one after another:
    `kv.counts[s]` of sequence s. Layer n is given `inputs[kinds[n]]`, and the first of them if there are no `kinds`.
    The first R numbers of queries and keys are rotated, halves paired. Rotated queries are multiplied by `query_scales`
    [Q] or [B * Q], if any. Keys and values are written to `kv`, then queries attend. `per_layer_inputs` [B * Q,
    num_layers, P]: what each layer is given of each token, if they are. The bits are those of the single ops, called
    one after another.

    `captured`: for each key n, 1 to `weights.num_layers` - 1, the state after the first n layers becomes its value [B,
    Q, D].
    """
    begin_call(x)
    stops = sorted(captured or ())
    masks: list[Tensor] = []
    if any(of_kind.masks for of_kind in inputs):
        masks = [mask for of_kind in inputs for mask in of_kind.masks or [_CAUSAL] * len(kv.bases)]
    states: Tensor = torch.ops.neap.decoder_layers.default(
        x,
        [of_kind.cos for of_kind in inputs],
        [of_kind.sin for of_kind in inputs],
        *(each.table for each in weights.tables),
        [each.table for each in kv.keys],
        [each.table for each in kv.values],
        kv.bases,
        kv.counts,
        masks,
        kinds,
        stops,
        weights.num_layers,
        weights.num_heads,
        weights.intermediates,
        weights.activation,
        weights.eps,
        weights.weight_offset,
        weights.scaling,
        weights.softcap,
        weights.places,
        weights.query_scale,
        weights.parallel_mlp,
        weights.experts_per_token,
        weights.norm_shares,
        query_scales,
        weights.norm_values,
        weights.reads_kv,
        None if weights.end_table is None else weights.end_table.table,
        per_layer_inputs,
    )
    *inner, out = states.unbind()
    if captured:
        captured.update(zip(stops, inner, strict=True))
    return out
