"""The layer op against its reference, against the single ops bit for bit, and token by token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared import ops
from shared.ops import reference
from shared.ops.experts import choose_experts, expert_table, experts
from shared.ops.layer import LayerInputs, LayerKV, LayerWeights, TensorTable, decoder_layers, stacked
from tests.tiers import tiered

DRAWN = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NOTHING = torch.empty(0)
PLAIN = torch.empty(0, dtype=torch.bool)
EXPERTS: dict[int, list[Tensor]] = {}  # by the address of their table, its matrices


@st.composite
def layers(draw: st.DrawFn) -> dict:
    head = draw(st.sampled_from([8, 12, 64]))
    spans = st.tuples(st.sampled_from([0, 1, 20, 255, 300, 600]), st.sampled_from([1, 2, 5, 50]), st.booleans())
    return {
        "spans": draw(st.lists(spans, min_size=1, max_size=4)),
        "width": draw(st.sampled_from([5, 48, 300])),
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.sampled_from([1, 3])),
        "head": head,
        "value_head": draw(st.sampled_from([8, 20])),
        "rotated": draw(st.sampled_from([head, head // 2 // 2 * 2, 0])),
        "intermediate": draw(st.sampled_from([7, 64])),
        "together": draw(st.sampled_from(["no", "in turn", "interleaved"])),
        "head_norms": draw(st.booleans()),
        "centred": draw(st.booleans()),
        "added_norms": draw(st.sampled_from([(False, False), (True, True), (True, False), (False, True)])),
        "mlp": draw(st.sampled_from(["after", "parallel", "parallel, norm shared"])),
        "gated": draw(st.booleans()),
        "experts": draw(st.sampled_from([0, 0, 1, 3, 9])),
        "chosen": draw(st.sampled_from([1, 2, 9])),
        "query_scale": draw(st.sampled_from([1.0, 0.3])),
        "query_scales": draw(st.booleans()),
        "biased": draw(st.sampled_from(["all", "some", "no"])),
        "sinks": draw(st.booleans()),
        "reads_kv": draw(st.sampled_from([False, False, True])),
        "norm_values": draw(st.booleans()),
        "given": draw(st.sampled_from([0, 0, 5, 16])),
        "scaled": draw(st.booleans()),
        "dtypes": draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=7)),
        "kv_dtype": draw(st.sampled_from(DTYPES)),
        "activation": draw(st.sampled_from(["silu", "gelu_tanh", "gelu", "relu"])),
        "softcap": draw(st.sampled_from([None, 2.0])),
    }


def _weights(p: dict) -> LayerWeights:
    width, kv, inner = p["width"], p["kv_heads"], p["intermediate"]
    q, k, v = kv * p["group"] * p["head"], kv * p["head"], kv * p["value_head"]
    apart, up, in_parallel = p["together"] == "no", inner * p["gated"], p["mlp"] != "after"
    shapes = [(q, width), (k, width), (v, width)] if apart else [(q + k + v, width), (0, 0), (0, 0)]
    if p["reads_kv"]:
        shapes[:3] = [(q, width), (0, 0), (0, 0)]
    shapes += [(width, kv * p["group"] * p["value_head"]), (inner, width), (up, width), (width, inner)]
    sizes = [rows for rows, _ in shapes[:4]] + [inner + up, width]

    def pack(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return ops.pack_linear((torch.randn(shape) / shape[1] ** 0.5).to(dtype)) if shape[0] else NOTHING

    packed = [pack(shape, dtype) for shape, dtype in zip(shapes, cycle(p["dtypes"]), strict=False)]
    if p["experts"]:
        each = [(inner, width), (inner, width), (width, inner)] * p["experts"]
        matrices = [pack(shape, dtype) for shape, dtype in zip(each, cycle(p["dtypes"]), strict=False)]
        table = expert_table(matrices)
        EXPERTS[table.data_ptr()] = matrices
        packed[4:] = [table, pack((p["experts"], width), torch.float32), NOTHING]

    def norm(*size: int, exists: bool = True) -> Tensor:
        return torch.randn(size) if exists else NOTHING

    pair, added = (2,) * p["centred"], [each and not in_parallel for each in p["added_norms"]]
    norms = [norm(*pair, width), norm(*pair, width, exists=p["mlp"] != "parallel, norm shared")]
    norms += [norm(p["head"], exists=p["head_norms"]) for _ in range(2)]
    norms += [norm(*pair, width, exists=exists) for exists in added]
    ends = [NOTHING] * 4
    if p["given"]:
        gate, out = (pack(shape, p["dtypes"][0]) for shape in ((p["given"], width), (width, p["given"])))
        ends[:3] = [gate, out, norm(*pair, width)]
    if p["scaled"] and (p["given"] or added[1]):
        ends[3] = torch.randn(1)
    if p["experts"]:
        sizes[4:] = [p["experts"], 0]
    sizes += [kv * p["group"] * p["sinks"]]
    biases = {
        "all": [torch.randn(size) for size in sizes],
        "some": [torch.randn(sizes[0]), *(NOTHING for _ in sizes[1:])],
        "no": [],
    }[p["biased"]]
    # A row of a group's queries, its key and its value, as in GPT-NeoX, or all queries, all keys and all values.
    group = p["group"] * p["head"]
    places = (0, p["head"], group, group + p["head"] + p["value_head"], group + p["head"])
    places += (group + p["head"] + p["value_head"],)
    interleaved = p["together"] == "interleaved" and p["group"] == 1
    if interleaved:
        places = (0, places[5], *places[2:])
    return LayerWeights(
        *(norms, packed, biases, kv * p["group"], (inner,), p["activation"]),
        *(1e-5, 0.0 if p["centred"] else 1.0, 0.3, p["softcap"], places if interleaved else ()),
        query_scale=p["query_scale"],
        parallel_mlp=in_parallel,
        experts_per_token=min(p["chosen"], p["experts"]),
        norm_shares=p["centred"],
        norm_values=p["norm_values"],
        reads_kv=[p["reads_kv"]] if p["reads_kv"] or p["biased"] == "no" else [],
        ends=ends if any(end.numel() for end in ends) else [],
    )


def _inputs(p: dict) -> tuple[Tensor, Tensor, Tensor, LayerKV, list[Tensor]]:
    bases, counts, masked = (list(column) for column in zip(*p["spans"], strict=True))
    tokens, kv = sum(counts), p["kv_heads"]
    sizes = [base + count + 3 for base, count in zip(bases, counts, strict=True)]
    kv = _kv(
        [torch.randn(1, kv, size, p["head"]).to(p["kv_dtype"]) for size in sizes],
        [torch.randn(1, kv, size, p["value_head"]).to(p["kv_dtype"]) for size in sizes],
        *(bases, counts),
    )
    masks = [
        torch.rand(1, 1, count, base + count) < 0.6 if hide else PLAIN
        for base, count, hide in zip(bases, counts, masked, strict=True)
    ]
    cos, sin = torch.randn(2, 1, tokens, p["rotated"]).unbind()
    return torch.randn(1, tokens, p["width"]), cos, sin, kv, masks


def _given(p: dict) -> LayerInputs:
    _, cos, sin, _, masks = _inputs(p)
    return LayerInputs(cos, sin, masks if any(mask.numel() for mask in masks) else ())


def _kv(keys: list[Tensor], values: list[Tensor], *places: list[int]) -> LayerKV:
    """The caches of one layer: a tensor per sequence. `places`: bases and counts."""
    return LayerKV([TensorTable([own]) for own in keys], [TensorTable([own]) for own in values], *places)


def _stores(tables: Sequence[TensorTable]) -> list[Tensor]:
    """Layer after layer, that of each sequence."""
    return [own for layer in zip(*(table.tensors for table in tables), strict=True) for own in layer]


def _copy(kv: LayerKV) -> LayerKV:
    keys, values = ([t.clone() for t in _stores(tables)] for tables in kv[:2])
    return _kv(keys, values, *kv[2:])


def _flat(
    weights: LayerWeights, matrices: Sequence[Any], kv: LayerKV, masks: list[Tensor], scales: Tensor | None
) -> tuple:
    w = weights
    return (
        *(w.norms, matrices, w.biases, _stores(kv.keys), _stores(kv.values), *kv[2:]),
        *(masks, [], [], w.num_layers, w.num_heads, w.intermediates),
        *(w.activation, w.eps, w.weight_offset, w.scaling, w.softcap, w.places, w.query_scale, w.parallel_mlp),
        *(w.experts_per_token, w.norm_shares, scales, w.norm_values),
    )


def _end(weights: LayerWeights, given: Tensor | None, unpack: Callable[[Tensor], Any] = lambda packed: packed) -> dict:
    """The rest of the reference's arguments."""
    ends = [unpack(each) if place % 4 < 2 else each for place, each in enumerate(weights.ends)]
    return {"reads_kv": weights.reads_kv, "ends": ends, "per_layer_inputs": given}


def _given_per_layer(p: dict, x: Tensor, num_layers: int = 1) -> Tensor | None:
    return torch.randn(x.shape[1], num_layers, p["given"]) if p["given"] else None


def _scales(p: dict, x: Tensor) -> Tensor | None:
    return torch.rand(x.shape[1]) if p["query_scales"] else None


def _step_by_step(
    x: Tensor, cos: Tensor, sin: Tensor, w: LayerWeights, kv: LayerKV, given: Tensor | None, *others: Any
) -> Tensor:
    """The steps of the reference, with the single ops in place of PyTorch."""

    def rows(packed: Tensor) -> int:
        return ops.unpack_linear(packed).shape[0]

    singles = {
        "packed_linear": lambda x, m, bias=None: ops.packed_linear(x, m, rows(m), bias),
        "packed_gated_linear": lambda x, gate, up, activation, bias: ops.packed_gated_linear(
            x, gate, up, rows(up), activation, bias
        ),
        "rms_norm": ops.rms_norm,
        "layer_norm": ops.layer_norm,
        "activate": ops.activate,
        "rotary": ops.rotary,
        "ragged_contiguous_attention": ops.ragged_contiguous_attention,
        "choose_experts": lambda x, m, chosen, normed, bias: choose_experts(x, m, rows(m), chosen, normed, bias),
        "experts": experts,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, single in singles.items():
            patch.setattr(reference, name, single)
        return reference.decoder_layers(x, [cos], [sin], *_flat(w, w.packed, kv, *others), **_end(w, given))[-1]


def _unpacked(packed: Tensor) -> Any:
    if packed.data_ptr() in EXPERTS and packed.numel():
        return [ops.unpack_linear(each) for each in EXPERTS[packed.data_ptr()]]
    return ops.unpack_linear(packed) if packed.numel() else packed


@DRAWN
@given(p=layers(), threads=st.sampled_from([1, 2, 3]))
def test_has_the_bits_of_the_single_ops(isa: str, p: dict, threads: int) -> None:
    weights, (x, cos, sin, kv, masks) = _weights(p), _inputs(p)
    expected_kv, spec_kv, scales, given = _copy(kv), _copy(kv), _scales(p, x), _given_per_layer(p, x)
    torch.set_num_threads(threads)
    out = decoder_layers(x, [LayerInputs(cos, sin, masks)], weights, kv, query_scales=scales, per_layer_inputs=given)
    torch.set_num_threads(1)
    assert torch.equal(out, _step_by_step(x, cos, sin, weights, expected_kv, given, masks, scales))
    for kept, expected in zip(kv[:2], expected_kv[:2], strict=True):
        assert all(map(torch.equal, _stores(kept), _stores(expected)))
    if weights.experts_per_token < p["experts"]:
        return  # of two nearly equal experts, sums in another order may choose the other one
    matrices: list[Any] = [_unpacked(packed) for packed in weights.packed]
    flat, end = _flat(weights, matrices, spec_kv, masks, scales), _end(weights, given, _unpacked)
    spec = reference.decoder_layers(x, [cos], [sin], *flat, **end)[-1]
    # Sums in another order may round a key or a value of 16 bits to its neighbour.
    tolerance = 1e-4 if p["kv_dtype"] == torch.float32 else 1e-2
    torch.testing.assert_close(out, spec, atol=tolerance * float(spec.abs().max()), rtol=1e-3)


@DRAWN
@given(
    p=layers(),
    kinds=st.lists(st.integers(0, 2), min_size=2, max_size=5),
    threads=st.sampled_from([1, 2]),
    wanted=st.sets(st.integers(1, 4)),
)
def test_a_stack_has_the_bits_of_its_layers_one_after_another(
    isa: str, p: dict, kinds: list[int], threads: int, wanted: set[int]
) -> None:
    num_layers = len(kinds)
    wanted = {count for count in wanted if count < num_layers}
    parts = [_weights(p) for _ in range(num_layers)]
    x, *_ = _inputs(p)
    # Layers of kind 1 attend causally, and one kind may be that of no layer.
    given_each = [_given(p), _given({**p, "spans": [(*span[:2], False) for span in p["spans"]]}), _given(p)]
    kvs = [_inputs(p)[3] for _ in parts]
    keys, values = (
        [
            TensorTable([table.tensors[0].clone() for table in layers])
            for layers in zip(*(kv[which] for kv in kvs), strict=True)
        ]
        for which in (0, 1)
    )
    before = x.clone()
    torch.set_num_threads(threads)
    captured = dict.fromkeys(wanted, x[:0])
    kv, given = LayerKV(keys, values, *kvs[0][2:]), _given_per_layer(p, x, num_layers)
    out = decoder_layers(x, given_each, stacked(parts), kv, kinds, captured, per_layer_inputs=given)
    torch.set_num_threads(1)
    assert torch.equal(x, before)
    states = []
    for layer, (weights, kv, kind) in enumerate(zip(parts, kvs, kinds, strict=True)):
        own = None if given is None else given[:, layer : layer + 1]
        x = decoder_layers(x, [given_each[kind]], weights, kv, per_layer_inputs=own)
        states.append(x)
    assert torch.equal(out, x)
    assert captured.keys() == wanted
    assert all(torch.equal(captured[count], states[count - 1]) for count in wanted)
    assert all(map(torch.equal, _stores(keys), (t for kv in kvs for t in _stores(kv.keys))))
    assert all(map(torch.equal, _stores(values), (t for kv in kvs for t in _stores(kv.values))))


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("threads", [1, 2])
def test_layers_of_several_sizes_that_share_keys_are_one_call(isa: str, count: int, threads: int) -> None:
    """As in Gemma 4: heads and MLPs of two widths, and the last two layers attend to what the first two have made."""
    usual = {**SMALL, "spans": [(20, count, False), (3, 2, False)], "norm_values": True, "given": 5, "scaled": True}
    usual |= {"added_norms": (True, True), "head_norms": True}
    narrow, wide = usual, {**usual, "head": 20, "value_head": 20, "rotated": 20}
    each = [narrow, wide, {**narrow, "reads_kv": True, "intermediate": 70}, {**wide, "reads_kv": True}]
    parts, kinds = [_weights(p) for p in each], [0, 1, 0, 1]
    x, *_ = _inputs(narrow)
    given, angles = _given_per_layer(narrow, x, 4), [_given(narrow), _given(wide)]
    own = [_inputs(p)[3] for p in each[:2]]
    kvs = [*own, *own]
    before = [_copy(kv) for kv in own]
    keys, values = ([TensorTable([kv[at][s].tensors[0] for kv in kvs]) for s in range(2)] for at in (0, 1))
    torch.set_num_threads(threads)
    out = decoder_layers(x, angles, stacked(parts), LayerKV(keys, values, *own[0][2:]), kinds, per_layer_inputs=given)
    torch.set_num_threads(1)
    for layer, (weights, kv, kind) in enumerate(zip(parts, before * 2, kinds, strict=True)):
        x = decoder_layers(x, [angles[kind]], weights, kv, per_layer_inputs=given[:, layer : layer + 1])
    assert torch.equal(out, x)
    for kv, expected in zip(own, before, strict=True):
        assert all(
            map(torch.equal, _stores(kv.keys) + _stores(kv.values), _stores(expected.keys) + _stores(expected.values))
        )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("count", "num_experts"), tiered([(1, 0), (3, 0), (20, 0), (1, 6), (3, 6), (20, 6)], {(3, 0), (3, 6)})
)
def test_threads_that_are_late_change_nothing(count: int, num_experts: int) -> None:
    """There are more threads than processors, so that some come when others have done their part, or many steps
    later."""
    p = {
        **SMALL, "spans": [(20, count, False)], "width": 256, "kv_heads": 2, "group": 3, "head": 64,
        "value_head": 64, "rotated": 64, "intermediate": 512, "experts": num_experts,
    }  # fmt: skip
    parts = [_weights(p) for _ in range(6)]
    x, cos, sin, kv, masks = _inputs(p)
    copies = [_copy(kv) for _ in parts]
    keys, values = (TensorTable([one[at][0].tensors[0] for one in copies]) for at in (0, 1))
    both = LayerKV([keys], [values], *kv[2:])
    expected = decoder_layers(x, [LayerInputs(cos, sin, masks)], stacked(parts), both)
    torch.set_num_threads(6)
    for _ in range(60):
        assert torch.equal(decoder_layers(x, [LayerInputs(cos, sin, masks)], stacked(parts), both), expected)


def test_layers_of_different_forms_are_not_stacked() -> None:
    weights = _weights(SMALL)
    with pytest.raises(ValueError, match="different forms"):
        stacked([weights, replace(weights, eps=1e-6)])


@DRAWN
@given(p=layers())
def test_a_token_has_the_same_bits_alone(isa: str, p: dict) -> None:
    p = {**p, "spans": [(base, min(count, 5), False) for base, count, _ in p["spans"]]}
    weights, (x, cos, sin, kv, _) = _weights(p), _inputs(p)
    alone_kv, scales, given = _copy(kv), _scales(p, x), _given_per_layer(p, x)
    out = decoder_layers(x, [LayerInputs(cos, sin)], weights, kv, query_scales=scales, per_layer_inputs=given)
    token = 0
    for index, (base, count, _) in enumerate(p["spans"]):
        for step in range(count):
            own = slice(token, token + 1)
            place = [base + step]
            own_kv = LayerKV([alone_kv.keys[index]], [alone_kv.values[index]], place, [1])
            own_scales, own_given = (None if each is None else each[own] for each in (scales, given))
            angles = LayerInputs(cos[:, own], sin[:, own])
            alone = decoder_layers(
                x[:, own], [angles], weights, own_kv, query_scales=own_scales, per_layer_inputs=own_given
            )
            assert torch.equal(alone, out[:, own])
            token += 1


SMALL = {
    "spans": [(3, 2, False)],
    "width": 12,
    "kv_heads": 2,
    "group": 2,
    "head": 8,
    "value_head": 8,
    "rotated": 8,
    "intermediate": 16,
    "together": "no",
    "centred": False,
    "added_norms": (False, False),
    "mlp": "after",
    "gated": True,
    "experts": 0,
    "chosen": 2,
    "query_scale": 1.0,
    "query_scales": False,
    "biased": "no",
    "sinks": False,
    "reads_kv": False,
    "norm_values": False,
    "given": 0,
    "scaled": False,
    "dtypes": DTYPES[:1],
    "kv_dtype": torch.float32,
    "head_norms": False,
    "activation": "silu",
    "softcap": None,
}


def test_rows_of_a_batch_share_positions_or_have_their_own() -> None:
    weights = _weights(SMALL)
    x, (cos, sin) = torch.randn(2, 3, 12), torch.randn(2, 2, 3, 8).unbind()
    stores = [torch.zeros(1, 2, 7, 8) for _ in range(4)]
    for angles in ((cos, sin), (cos[:1], sin[:1])):
        out = decoder_layers(x, [LayerInputs(*angles)], weights, _kv(stores[:2], stores[2:], [4, 1], [3, 3]))
        for row, base in enumerate((4, 1)):
            own = [angle[row : row + 1] if len(angle) > 1 else angle for angle in angles]
            own_kv = _kv(stores[row : row + 1], stores[2 + row : 3 + row], [base], [3])
            assert torch.equal(decoder_layers(x[row : row + 1], [LayerInputs(*own)], weights, own_kv)[0], out[row])


def test_no_tokens_are_no_work() -> None:
    weights, (x, cos, sin, kv, _) = _weights(SMALL), _inputs(SMALL)
    out = decoder_layers(x[:, :0], [LayerInputs(cos[:, :0], sin[:, :0])], weights, kv)
    assert out.shape == (1, 0, 12)
