"""Drafts verified: the CPU's kernels against their references."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.ops import reference
from shared.ops.batches import verify_greedy, verify_sampled

DRAWN = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
WEIGHTS = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


def drafted(rows: int, sequences: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """drafts [T] and starts [S + 1]; sequences may be empty."""
    cuts = torch.randint(0, rows + 1, (sequences - 1,)).sort().values
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([rows])])
    return torch.randint(-1, vocabulary, (rows,)), starts


@DRAWN
@given(
    rows=st.integers(0, 9),
    sequences=st.integers(1, 4),
    vocabulary=st.one_of(st.integers(1, 9), st.sampled_from([64, 200, 513, 1000])),
    dtype=WEIGHTS,
)
def test_greedy_verification_agrees_with_its_reference(
    isa: str, rows: int, sequences: int, vocabulary: int, dtype: torch.dtype
) -> None:
    # Few values: ties, of which the first counts.
    logits = torch.randint(-3, 4, (rows, vocabulary)).to(dtype)
    drafts, starts = drafted(rows, sequences, vocabulary)
    right = torch.rand(rows) < 0.8
    drafts[right] = logits.argmax(-1)[right] if rows else drafts[right]
    choices, accepted = verify_greedy(logits, drafts, starts)
    expected = torch.tensor(
        [int((row == row.max()).nonzero()[0]) for row in logits], dtype=torch.int64
    )
    assert torch.equal(choices, expected)
    assert torch.equal(accepted, reference.accepted(expected, drafts, starts))


def test_greedy_choices_of_infinities_and_nan_are_those_of_torch(isa: str) -> None:
    logits = torch.randn(4, 777)
    logits[0] = float("-inf")
    logits[1, [5, 600]] = float("inf")
    logits[2, [700, 300]] = float("nan")
    logits[3, 776] = 50.0
    choices, _ = verify_greedy(logits, torch.zeros(4, dtype=torch.int64), torch.tensor([0, 4]))
    assert choices.tolist() == [0, 5, 300, 776]


@DRAWN
@given(
    rows=st.integers(1, 6),
    sequences=st.integers(1, 3),
    vocabulary=st.integers(2, 60),
    dtype=WEIGHTS,
    proposes=st.booleans(),
)
def test_sampled_verification_agrees_with_its_reference(
    isa: str, rows: int, sequences: int, vocabulary: int, dtype: torch.dtype, proposes: bool
) -> None:
    target = torch.randn(rows, vocabulary).mul(2).softmax(-1).to(dtype)
    proposed = torch.randn(rows, vocabulary).softmax(-1).to(dtype) if proposes else None
    drafts, starts = drafted(rows, sequences, vocabulary)
    uniforms = torch.rand(rows, dtype=torch.float64)
    choices, accepted = verify_sampled(target, drafts, starts, uniforms, proposed)
    expected, counts = reference.verify_sampled(target, drafts, starts, uniforms, proposed)
    assert torch.equal(choices, expected)
    assert torch.equal(accepted, counts)


@pytest.mark.parametrize("proposes", [True, False])
def test_sampling_keeps_the_full_models_distribution_and_accepts_as_often_as_can_be(
    proposes: bool,
) -> None:
    target = torch.tensor([0.5, 0.2, 0.2, 0.1, 0.0])
    proposed = torch.tensor([0.1, 0.4, 0.1, 0.1, 0.3])
    count = 40_000
    drafts = (
        torch.multinomial(proposed, count, replacement=True)
        if proposes
        else torch.full((count,), 2)
    )
    starts = torch.tensor([0, count])
    choices, _ = verify_sampled(
        target.expand(count, -1).contiguous(),
        drafts,
        starts,
        torch.rand(count, dtype=torch.float64),
        proposed.expand(count, -1).contiguous() if proposes else None,
    )
    shares = choices.bincount(minlength=5) / count
    torch.testing.assert_close(shares, target, atol=0.012, rtol=0)
    rate = float((choices == drafts).float().mean())
    best = float(torch.minimum(target, proposed).sum()) if proposes else 0.2
    assert rate == pytest.approx(best, abs=0.012)


def test_a_point_past_all_mass_takes_the_last_token_that_has_any(isa: str) -> None:
    target = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    draft, starts = torch.tensor([-1]), torch.tensor([0, 1])
    almost = torch.tensor([1.0 - 1e-16], dtype=torch.float64)
    assert verify_sampled(target, draft, starts, almost)[0].tolist() == [2]
    assert verify_sampled(target, draft, starts, almost * 0)[0].tolist() == [1]


def test_wrong_arguments_are_named() -> None:
    logits, drafts, starts = (
        torch.randn(3, 5),
        torch.zeros(3, dtype=torch.int64),
        torch.tensor([0, 3]),
    )
    with pytest.raises(RuntimeError, match="starts must ascend"):
        verify_greedy(logits, drafts, torch.tensor([0, 4]))
    with pytest.raises(RuntimeError, match=r"drafts has shape \[2\], want \[3\]"):
        verify_greedy(logits, drafts[:2], starts)
    with pytest.raises(RuntimeError, match="uniforms must be float64"):
        verify_sampled(logits, drafts, starts, torch.rand(3))
