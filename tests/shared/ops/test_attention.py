import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared import ops
from shared.ops import reference

DRAWN = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


KV_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


SINKS = st.sampled_from([None, -3.0, 0.0, 4.0])  # beside scores of about 1


def _cache_views(batch: int, heads: int, slots: int, width: int) -> Tensor:
    """A view [B, H, slots, D] of a larger buffer, as a preallocated cache returns."""
    return torch.randn(batch, heads, slots + 7, width)[:, :, :slots]


@st.composite
def problems(draw: st.DrawFn) -> dict:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 60]))
    queries = draw(st.one_of(st.integers(1, 20), st.sampled_from([49, 97])))
    # The kernel processes keys in blocks of 256. With fewer keys than queries, some queries see no key.
    keys = draw(st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 300, 600])))
    return {
        "batch": draw(st.integers(1, 2)),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "group": group,
        "queries": min(queries, 20) if group == 60 else queries,
        "keys": keys,
        "width": draw(st.sampled_from([1, 3, 8, 16, 24, 64, 260])),
        "value_width": draw(st.sampled_from([1, 8, 12, 16, 64, 72])),
        "softcap": draw(st.sampled_from([None, 2.0])),
        "masked": draw(st.sampled_from(["no", "per row", "shared"])),
        "causal": draw(st.booleans()),
        "sinks": draw(SINKS),
    }


def _sinks(p: dict) -> Tensor | None:
    return None if p["sinks"] is None else p["sinks"] + torch.randn(p["kv_heads"] * p["group"])


def _inputs(p: dict) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q = torch.randn(p["batch"], p["queries"], p["heads"], p["width"]).transpose(1, 2)
    k = _cache_views(p["batch"], p["kv_heads"], p["keys"], p["width"])
    v = _cache_views(p["batch"], p["kv_heads"], p["keys"], p["value_width"])
    if p["masked"] == "no":
        return q, k, v, None
    rows = p["batch"] if p["masked"] == "per row" else 1
    mask = torch.rand(rows, 1, p["queries"], p["keys"]) < 0.6
    mask[:, :, 0] = False
    return q, k, v, mask


@DRAWN
@given(p=problems())
def test_agrees_with_its_reference(isa: str, p: dict) -> None:
    q, k, v, mask = _inputs(p)
    options = (p["keys"], mask, p["causal"], p["width"] ** -0.5, p["softcap"], _sinks(p))
    out = ops.contiguous_attention(q, k, v, *options)
    wanted = reference.contiguous_attention(q, k, v, *options)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=1e-4)


@DRAWN
@given(p=problems(), kv_dtype=st.sampled_from(KV_DTYPES[1:]))
def test_16_bit_keys_and_values_give_the_bits_of_the_same_numbers_in_float32(
    isa: str, p: dict, kv_dtype: torch.dtype
) -> None:
    q, k, v, mask = _inputs(p)
    k, v = k.to(kv_dtype), v.to(kv_dtype)
    options = (p["keys"], mask, p["causal"], None, p["softcap"], _sinks(p))
    dequantised = ops.contiguous_attention(q, k.float(), v.float(), *options)
    assert torch.equal(ops.contiguous_attention(q, k, v, *options), dequantised)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
def test_stored_keys_and_values_are_rounded_as_pytorch_rounds(isa: str, kv_dtype: torch.dtype) -> None:
    edges = [65504.0, 65519.9, 65520.0, 3.39e38, 2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 1e-45]
    edges += [0.0, float("inf"), 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
    drawn = torch.randn(4000) * 10.0 ** torch.randint(-9, 6, (4000,))
    numbers = torch.cat([torch.tensor(edges), -torch.tensor(edges), drawn])[None, None, None]
    stores = [torch.zeros_like(numbers, dtype=kv_dtype) for _ in range(2)]
    empty = torch.empty(0, dtype=torch.bool)
    q = torch.zeros_like(numbers)
    ops.ragged_contiguous_attention(q, numbers, -numbers, stores[:1], stores[1:], [0], [1], [empty])
    for stored, wanted in zip(stores, (numbers, -numbers), strict=True):
        assert torch.equal(stored.view(torch.int16), wanted.to(kv_dtype).view(torch.int16))
    ops.ragged_contiguous_attention(
        *(q, torch.full_like(q, float("nan")), q, stores[:1], stores[1:], [0], [1], [empty])
    )
    assert stores[0].isnan().all()


@DRAWN
@given(p=problems())
def test_a_query_has_the_same_bits_alone_over_a_shorter_view(isa: str, p: dict) -> None:
    q, k, v, mask = _inputs(p)
    more = (None, p["softcap"], _sinks(p))
    together = ops.contiguous_attention(q, k, v, p["keys"], mask, True, *more)
    for j in range(p["queries"]):
        end = max(0, p["keys"] - p["queries"] + j + 1)
        own = None if mask is None else mask[:, :, j : j + 1, :end]
        alone = ops.contiguous_attention(q[:, :, j : j + 1], k, v, end, own, True, *more)
        assert torch.equal(alone[:, 0], together[:, j])


@pytest.mark.parametrize(("queries", "keys"), [(1, 900), (8, 300), (8, 3000), (200, 200)])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-4, 4, 9)], ids=["plain", "sinks"])
def test_has_the_same_bits_for_any_number_of_threads(queries: int, keys: int, sinks: Tensor | None) -> None:
    """Few queries of many keys are split over threads."""
    q, (k, v) = torch.randn(1, 9, queries, 64), torch.randn(2, 1, 3, keys, 64).unbind()
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(ops.contiguous_attention(q, k, v, keys, sinks=sinks))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_agrees_with_pytorch_on_a_long_prompt() -> None:
    q, (k, v) = torch.randn(1, 9, 300, 64), torch.randn(2, 1, 3, 300, 64).unbind()
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ops.contiguous_attention(q, k, v, 300).transpose(1, 2), wanted, atol=1e-5, rtol=1e-4)


def test_a_mask_that_says_causal_gives_the_bits_of_causal() -> None:
    q, (k, v) = torch.randn(2, 6, 8, 16), torch.randn(2, 2, 2, 300, 16).unbind()
    mask = torch.ones(1, 1, 8, 300, dtype=torch.bool).tril(292)
    assert torch.equal(ops.contiguous_attention(q, k, v, 300, mask, False), ops.contiguous_attention(q, k, v, 300))


def test_a_row_that_sees_nothing_is_zero_and_large_scores_do_not_overflow() -> None:
    q, (k, v) = torch.full((1, 1, 2, 8), 100.0), torch.full((2, 1, 1, 5, 8), 100.0).unbind()
    mask = torch.tensor([False, True])[None, None, :, None].expand(1, 1, 2, 5)
    out = ops.contiguous_attention(q, k, v, 5, mask, False)
    assert torch.equal(out[0, 0], torch.zeros(1, 8))
    torch.testing.assert_close(out[0, 1], torch.full((1, 8), 100.0))


@pytest.mark.parametrize("keys", [5, 600])
def test_a_sink_takes_its_share_whatever_it_is(isa: str, keys: int) -> None:
    q, (k, v) = torch.randn(1, 6, 2, 8), torch.randn(2, 1, 2, keys, 8).unbind()
    sinks = torch.tensor([float("-inf"), 1e30, float("nan"), -1e30, 150.0, 0.5])
    out, plain = (ops.contiguous_attention(q, k, v, keys, sinks=each) for each in (sinks, None))
    for head in (0, 3):
        assert torch.equal(out[:, :, head], plain[:, :, head])
    assert torch.equal(out[:, :, 1], torch.zeros(1, 2, 8))
    assert out[:, :, 2].isnan().all()
    assert out[:, :, 4].abs().max() < 1e-30
    scores = (q[0, 5].double() @ k[0, 1].double().T / 8**0.5).masked_fill(
        ~torch.ones(2, keys).tril(keys - 2).bool(), -1e9
    )
    shares = torch.cat([scores, torch.full((2, 1), 0.5)], 1).softmax(1)[:, :-1]
    torch.testing.assert_close(out[0, :, 5].double(), shares @ v[0, 1].double(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("sink", [float("-inf"), -5.0, 1e30, float("nan")])
def test_beside_a_sink_too_a_row_that_sees_nothing_is_zero(sink: float) -> None:
    q, (k, v) = torch.randn(1, 2, 3, 8), torch.randn(2, 1, 1, 600, 8).unbind()
    nothing = torch.zeros(1, 1, 3, 600, dtype=torch.bool)
    sinks = torch.full((2,), sink)
    assert torch.equal(ops.contiguous_attention(q, k, v, 600, nothing, sinks=sinks), torch.zeros(1, 3, 2, 8))
    assert torch.equal(ops.contiguous_attention(q, k, v, 0, sinks=sinks), torch.zeros(1, 3, 2, 8))


def test_slots_past_the_view_are_never_read() -> None:
    k, v = torch.full((2, 1, 1, 40, 8), float("nan")).unbind()
    k[:, :, :20], v[:, :, :20] = torch.randn(2, 20, 8)
    assert ops.contiguous_attention(torch.randn(1, 2, 3, 8), k, v, 20).isfinite().all()


def test_empty_tensors() -> None:
    k, v = torch.randn(2, 1, 1, 4, 8).unbind()
    assert ops.contiguous_attention(torch.randn(1, 2, 0, 8), k, v, 4).shape == (1, 0, 2, 8)
    no_keys = ops.contiguous_attention(torch.randn(1, 2, 3, 8), k[:, :, :0], v[:, :, :0], 0)
    assert torch.equal(no_keys, torch.zeros(1, 3, 2, 8))


WRONG_SINKS = [
    ({"sinks": torch.zeros(2)}, r"sinks must be contiguous with shape \[4\], got \[2\]"),
    ({"sinks": torch.zeros(8)[::2]}, "sinks must be contiguous"),
    ({"sinks": torch.zeros(4, 1)}, "sinks has shape"),
    ({"sinks": torch.zeros(4).bfloat16()}, "sinks must be float32"),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(1, 3, 2, 8)}, "3 query heads cannot share 2 key heads"),
        ({"q": torch.randn(1, 4, 2, 9)}, "do not fit"),
        ({"q": torch.randn(2, 4, 2, 8)}, "do not fit"),
        ({"v": torch.randn(1, 2, 5, 8)}, "do not fit"),
        ({"q": torch.randn(1, 4, 2, 8).half()}, "q must be float32"),
        ({"k": torch.randn(1, 2, 8, 6).transpose(2, 3)}, "last dimension of k and v"),
        ({"kv_length": 7}, "exceeds the 6 slots"),
        ({"k": torch.randn(1, 2, 6, 8).half()}, "values are of another dtype than keys"),
        ({"k": torch.randn(1, 2, 6, 8).double()}, "keys must be float32, float16 or bfloat16"),
        ({"mask": torch.ones(1, 1, 2, 6)}, "mask must be a bool tensor"),
        ({"mask": torch.ones(1, 1, 2, 5, dtype=torch.bool)}, r"want \[1 or 1, 1, 2, 6\]"),
        ({"softcap": 0.0}, "softcap must be positive"),
        *WRONG_SINKS,
    ],
)
def test_wrong_arguments_are_named(change: dict, message: str) -> None:
    k, v = torch.randn(2, 1, 2, 6, 8).unbind()
    arguments = {"q": torch.randn(1, 4, 2, 8), "k": k, "v": v, "kv_length": 6}
    with pytest.raises(RuntimeError, match=message):
        ops.contiguous_attention(**{**arguments, **change})


@st.composite
def ragged_problems(draw: st.DrawFn) -> dict:
    lengths = st.sampled_from([0, 1, 5, 20, 255, 256, 300, 600])
    spans = st.tuples(lengths, st.sampled_from([1, 2, 3, 9, 50]), st.booleans())
    return {
        "spans": draw(st.lists(spans, min_size=1, max_size=6)),
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.sampled_from([1, 3, 7])),
        "width": draw(st.sampled_from([3, 16, 64])),
        "value_width": draw(st.sampled_from([8, 64])),
        "softcap": draw(st.sampled_from([None, 2.0])),
        "kv_dtype": draw(st.sampled_from(KV_DTYPES)),
        "sinks": draw(SINKS),
    }


@DRAWN
@given(p=ragged_problems())
def test_sequences_of_a_ragged_batch_attend_as_each_does_alone(isa: str, p: dict) -> None:
    bases, counts, masked = (list(column) for column in zip(*p["spans"], strict=True))
    tokens = sum(counts)
    q = torch.randn(1, tokens, p["kv_heads"] * p["group"], p["width"]).transpose(1, 2)
    k = torch.randn(1, tokens, p["kv_heads"], p["width"]).transpose(1, 2)
    v = torch.randn(1, p["kv_heads"], tokens, p["value_width"])
    sizes = [base + count + 3 for base, count in zip(bases, counts, strict=True)]
    keys, values = (
        [torch.randn(1, p["kv_heads"], size, width).to(p["kv_dtype"]) for size in sizes]
        for width in (p["width"], p["value_width"])
    )
    masks = [
        torch.rand(1, 1, count, base + count) < 0.6 if hide else torch.empty(0, dtype=torch.bool)
        for base, count, hide in zip(bases, counts, masked, strict=True)
    ]
    expected_keys, expected_values = [t.clone() for t in keys], [t.clone() for t in values]
    more = (0.3, p["softcap"], _sinks(p))
    expected = reference.ragged_contiguous_attention(
        q, k, v, expected_keys, expected_values, bases, counts, masks, *more
    )
    out = ops.ragged_contiguous_attention(q, k, v, keys, values, bases, counts, masks, *more)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    start = 0
    for index, (base, count) in enumerate(zip(bases, counts, strict=True)):
        assert torch.equal(keys[index], expected_keys[index])
        assert torch.equal(values[index], expected_values[index])
        own = slice(start, start + count)
        mask = masks[index] if masked[index] else None
        alone = ops.contiguous_attention(
            q[:, :, own], keys[index], values[index], base + count, mask, mask is None, *more
        )
        assert torch.equal(out[:, own], alone)
        start += count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bases": [6]}, "cannot take 2 tokens from position 6 on"),
        ({"bases": [-1]}, "cannot take"),
        ({"bases": []}, "0 bases"),
        ({"counts": [1]}, "counts sum to 1 tokens, but q has 2"),
        ({"counts": [0]}, "cannot take"),
        ({"keys": []}, "0 caches of keys"),
        ({"masks": [torch.ones(1, 1, 2, 3, dtype=torch.bool)]}, "mask has shape"),
        ({"values": [torch.zeros(1, 1, 7, 8)]}, "cannot take"),
        ({"q": torch.zeros(2, 4, 2, 8)}, "do not fit"),
        *WRONG_SINKS,
    ],
)
def test_attention_of_a_ragged_batch_refuses_what_does_not_fit(change: dict, message: str) -> None:
    arguments = {
        "q": torch.zeros(1, 4, 2, 8),
        "k": torch.zeros(1, 2, 2, 8),
        "v": torch.zeros(1, 2, 2, 8),
        "keys": [torch.zeros(1, 2, 7, 8)],
        "values": [torch.zeros(1, 2, 7, 8)],
        "bases": [3],
        "counts": [2],
        "masks": [torch.empty(0, dtype=torch.bool)],
    }
    with pytest.raises(RuntimeError, match=message):
        ops.ragged_contiguous_attention(**{**arguments, **change})
