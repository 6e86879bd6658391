"""Draft vocabulary and confidence head: the CPU kernels against their references, over shapes drawn by hypothesis."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.ops import reference
from shared.ops.chains import ConfidenceWeights, draft_top, new_tickets, route

DRAWN = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
# The sizes around which the kernels change their path: lanes of 4 to 16, groups of 4 rows and 2 tokens, blocks of 16
# and 64 rows.
TOKENS = st.integers(1, 5)
WIDTHS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 100]))
# The tolerance for sums of the same float32 products in another order.
CLOSE = {"atol": 2e-5, "rtol": 2e-4}


@DRAWN
@given(
    tokens=TOKENS,
    width=WIDTHS,
    size=st.one_of(st.integers(8, 140), st.just(300)),
    k=st.integers(1, 8),
    weights=DTYPES,
    biased=st.booleans(),
)
def test_draft_top_agrees_with_its_reference_and_ignores_its_neighbours(
    isa: str, tokens: int, width: int, size: int, k: int, weights: torch.dtype, biased: bool
) -> None:
    x, rows = torch.randn(tokens, width), torch.randn(size, width).to(weights)
    bias = torch.randn(size) if biased else None
    values, indices, log_mass = draft_top(x, rows, bias, k)
    expected, places, mass = reference.draft_top(x, rows, bias, k)
    torch.testing.assert_close(values, expected, **CLOSE)
    torch.testing.assert_close(log_mass, mass, **CLOSE)
    distinct = (expected - expected.roll(1, -1)).abs().min() > 1e-4 or k == 1
    assert not distinct or torch.equal(indices, places)
    for row in range(tokens):
        alone = draft_top(x[row : row + 1], rows, bias, k)
        for part, whole in zip(alone, (values, indices, log_mass), strict=True):
            assert torch.equal(part[0], whole[row])


def test_of_equal_logits_the_first_is_chosen_and_nan_never(isa: str) -> None:
    rows = torch.zeros(200, 3)
    bias = torch.full((200,), -1.0)
    bias[[130, 66, 7]] = 5.0
    bias[3] = float("nan")
    values, indices, _ = draft_top(torch.ones(1, 3), rows, bias, 4)
    assert indices.tolist() == [[7, 66, 130, 0]]
    assert values.tolist() == [[5.0, 5.0, 5.0, -1.0]]


def test_large_logits_do_not_overflow_the_mass(isa: str) -> None:
    rows = torch.tensor([[300.0], [299.0], [-500.0], [float("-inf")]])
    values, _, log_mass = draft_top(torch.ones(1, 1), rows, None, 2)
    assert values.tolist() == [[300.0, 299.0]]
    assert float(log_mass) == pytest.approx(300.0 + 0.3132617, abs=1e-4)


def confidence(width: int, size: int, dtype: torch.dtype) -> ConfidenceWeights:
    return ConfidenceWeights(
        hidden=(torch.randn(size, width) / width**0.5).to(dtype),
        bias=torch.randn(size),
        output=torch.randn(size) / size**0.5,
        features=torch.randn(3, size),
        skip=torch.randn(3),
        shift=0.3,
        eps=1e-3,
    )


def evidence(tokens: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """top [N, k], log_mass [N], distance [N]."""
    logits = torch.randn(tokens, 12)
    return logits.topk(k).values, logits.logsumexp(-1), torch.randint(1, 6, (tokens,))


def referred(x: torch.Tensor, weights: ConfidenceWeights, *others: object) -> torch.Tensor:
    w = weights
    top, log_mass, distance, *limits = others
    return reference.route(
        x, w.hidden, w.bias, w.output, w.features, w.skip, top, log_mass, distance, w.shift, w.eps, *limits
    )  # fmt: skip


@DRAWN
@given(tokens=st.integers(0, 20), width=WIDTHS, size=WIDTHS, k=st.integers(1, 3), dtype=DTYPES, mixed=st.booleans())
def test_route_agrees_with_its_reference(
    isa: str, tokens: int, width: int, size: int, k: int, dtype: torch.dtype, mixed: bool
) -> None:
    x = (torch.randn(tokens, width) + 5).to(torch.float32 if mixed else dtype)
    weights = confidence(width, size, dtype)
    others = (*evidence(tokens, k), 0.01, 0.99)
    tickets = new_tickets(tokens)
    probability = route(x, weights, *others, tickets)
    torch.testing.assert_close(probability, referred(x, weights, *others), **CLOSE)
    assert not tickets.any()


def test_route_keeps_to_its_limits() -> None:
    weights = confidence(4, 4, torch.float32)
    for shift, limit in ((-60.0, 0.01), (60.0, 0.99)):
        sure = ConfidenceWeights(**{**vars(weights), "shift": shift})
        others = (*evidence(2, 2), 0.01, 0.99)
        probability = route(torch.randn(2, 4), sure, *others, new_tickets(2))
        assert probability.tolist() == pytest.approx([limit, limit])


def test_the_same_bits_for_any_number_of_threads() -> None:
    x, rows = torch.randn(2, 576), torch.randn(3000, 576).half()
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(draft_top(x, rows, None, 2))
    for one, two, five in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, five)


def test_every_float16_is_read_right(isa: str) -> None:
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    numbers = bits.view(torch.float16)[bits.view(torch.float16).isfinite()]
    for count in (numbers.numel(), 7):  # whole vectors, and the rest of one
        rows = numbers[: numbers.numel() // count * count].view(-1, count)
        x = torch.zeros(1, count)
        for place in (0, count // 2, count - 1):
            x.zero_()[0, place] = 1.0
            values, _, _ = draft_top(x, rows, None, 1)
            assert float(values) == float(rows[:, place].float().max())


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(RuntimeError, match="k is 9"):
        draft_top(torch.randn(1, 4), torch.randn(20, 4), None, 9)
    with pytest.raises(RuntimeError, match=r"k is 4, want 1 to 8 of 3 rows"):
        draft_top(torch.randn(1, 4), torch.randn(3, 4), None, 4)
    weights = confidence(4, 4, torch.float16)
    others = (*evidence(9, 2), 0.0, 1.0)
    with pytest.raises(RuntimeError, match="at least 2 of them"):
        route(torch.randn(9, 4), weights, *others, new_tickets(8))
    with pytest.raises(RuntimeError, match=r"log_mass has shape \[1\], want \[9\]"):
        route(torch.randn(9, 4), weights, others[0], others[1][:1], *others[2:], new_tickets(9))
    with pytest.raises(RuntimeError, match="float32 or of hidden's dtype"):
        route(torch.randn(9, 4).bfloat16(), weights, *others, new_tickets(9))
