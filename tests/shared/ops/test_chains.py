"""Whole chains of drafts in one call: against the reference, against themselves in parts and in other company, and the
stop rule."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared import ops
from shared.ops import chain_reference
from shared.ops.chains import Chains, ChainStart, ChainWeights, ConfidenceWeights, draft_chains

DRAWN = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCABULARY = 150
LIMITS = (1e-3, 0.999)
MATRICES = ("fuse", "next", "gate", "up", "down", "rows", "hidden")
ROUTER = 20


def plain_weights(
    depth_width: int, width: int, embedded: int, inner: int, drafts: int, *, biased: bool = True
) -> ChainWeights:
    """Weights whose matrices are not packed, as the reference takes them. `next` is not the sum of parts of `fuse`."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns) / columns**0.5

    return ChainWeights(
        fuse=matrix(width, 3 * depth_width + embedded),
        next=matrix(width, width + embedded),
        gate=matrix(inner, width),
        up=matrix(inner, width),
        down=matrix(width, inner),
        rows=3 * matrix(drafts, width),
        hidden=matrix(ROUTER, width),
        embedding=torch.randn(VOCABULARY, embedded),
        vocabulary=torch.randperm(VOCABULARY)[:drafts],
        norm=torch.randn(width),
        gain=torch.randn(width),
        bias=torch.randn(drafts) if biased else None,
        confidence=ConfidenceWeights(
            hidden=torch.empty(0),
            bias=torch.randn(ROUTER),
            output=torch.randn(ROUTER) / ROUTER**0.5,
            features=torch.randn(3, ROUTER),
            skip=torch.randn(3),
            shift=0.3,
            eps=1e-6,
        ),
    )


def packed(weights: ChainWeights, dtype: torch.dtype = torch.float32) -> ChainWeights:
    return replace(weights, **{name: ops.pack_linear(getattr(weights, name).to(dtype)) for name in MATRICES})


def rounded(weights: ChainWeights, dtype: torch.dtype) -> ChainWeights:
    return replace(weights, **{name: getattr(weights, name).to(dtype).float() for name in MATRICES})


def certain(probability: float) -> ChainWeights:
    """Small weights whose confidence head gives every draft the same probability."""
    weights = plain_weights(6, 8, 6, 12, 20)
    nothing = torch.zeros(ROUTER)
    shift = float(torch.logit(torch.tensor(probability)))
    confidence = replace(weights.confidence, output=nothing, skip=torch.zeros(3), shift=shift)
    return packed(replace(weights, confidence=confidence))


@st.composite
def chain_starts(draw: st.DrawFn) -> tuple[int, list[ChainStart]]:
    """The number of sequences that begin with states, and all starts."""
    tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4)
    start = st.builds(
        ChainStart,
        tokens=tokens,
        place=st.integers(0, 3),
        room=st.integers(1, 4),
        survival=st.sampled_from([1.0, 0.4]),
        factor=st.sampled_from([1.0, 0.7, 3.0]),
        least_survival=st.sampled_from([0.0, 0.1, 0.5]),
    )
    starts = draw(st.lists(start, min_size=1, max_size=9))
    return draw(st.integers(0, len(starts))), starts


@DRAWN
@given(
    drawn=chain_starts(),
    width=st.sampled_from([5, 48, 100]),
    depth_width=st.sampled_from([8, 48]),
    embedded=st.sampled_from([7, 48]),
    inner=st.sampled_from([20, 300]),
    drafts=st.sampled_from([2, 63, 64, 65, 140]),
    dtype=st.sampled_from(DTYPES),
    embedding=st.sampled_from([*DTYPES, None]),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_chains_agree_with_their_reference_and_ignore_their_neighbours(
    isa: str,
    drawn: tuple[int, list[ChainStart]],
    width: int,
    depth_width: int,
    embedded: int,
    inner: int,
    drafts: int,
    dtype: torch.dtype,
    embedding: torch.dtype | None,
    biased: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    fresh, starts = drawn
    weights = plain_weights(depth_width, width, embedded, inner, drafts, biased=biased)
    weights = rounded(weights, dtype)
    if embedding is not None:
        weights = replace(weights, embedding=weights.embedding.to(embedding))
    states, outputs = torch.randn(fresh, 3, depth_width), torch.randn(len(starts) - fresh, width)
    own = packed(weights, dtype)
    if embedding is None:
        own = replace(own, embedding=ops.pack_linear(own.embedding))
    found = draft_chains(states, outputs, starts, own, *LIMITS, 4)
    expected = chain_reference.draft_chains(states, outputs, starts, weights, *LIMITS, 4)
    for part, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(part, wanted, atol=1e-4, rtol=1e-3)
    nothing = (states[:0], outputs[:0])
    for row, start in enumerate(starts):
        one = slice(row, row + 1), slice(row - fresh, row - fresh + 1)
        begun = (states[one[0]], nothing[1]) if row < fresh else (nothing[0], outputs[one[1]])
        alone = draft_chains(*begun, [start], own, *LIMITS, 4)
        for part, whole in zip(alone, found, strict=True):
            assert torch.equal(part[0], whole[row])


@pytest.fixture
def weights() -> ChainWeights:
    torch.manual_seed(3)
    return plain_weights(48, 48, 48, 96, 100)


def one_chain(weights: ChainWeights, states: Tensor, tokens: list[int], room: int, place: int = 0) -> Chains:
    """The chain of one sequence, from its states [1, 3, D] or from an output [1, W]."""
    fresh = states if states.dim() == 3 else torch.empty(0, 3, 48)
    begun = torch.empty(0, 48) if states.dim() == 3 else states
    start = ChainStart(tokens, place, room, 1.0, 1.0, 0.0)
    return draft_chains(fresh, begun, [start], weights, *LIMITS, room)


def test_a_chain_goes_on_from_any_of_its_outputs_as_if_it_had_not_ended(weights: ChainWeights) -> None:
    own, states = packed(weights), torch.randn(1, 3, 48)
    whole = one_chain(own, states, [5], 4)
    tokens = whole.tokens[0].tolist()
    assert len({5, *tokens}) == 5, "equal tokens show nothing"
    for done in (1, 2, 3):
        rest = one_chain(own, whole.outputs[:, done - 1], [tokens[done - 1]], 4 - done, place=done)
        fed = one_chain(own, states, [5, *tokens[:done]], 4 - done)
        for part in (rest, fed):
            assert torch.equal(part.tokens[0], whole.tokens[0, done:])
            assert torch.equal(part.probabilities[0], whole.probabilities[0, done:])
            assert torch.equal(part.outputs[0], whole.outputs[0, done:])


def test_matrices_in_any_format_give_the_bits_of_their_float32_numbers(weights: ChainWeights) -> None:
    states = torch.randn(1, 3, 48)
    for dtype in DTYPES[1:]:
        narrow, wide = packed(weights, dtype), packed(rounded(weights, dtype))
        for part, whole in zip(*(one_chain(w, states, [5, 9], 4) for w in (narrow, wide)), strict=True):
            assert torch.equal(part, whole)


def test_the_same_bits_for_any_number_of_threads() -> None:
    torch.manual_seed(0)
    weights = packed(plain_weights(256, 256, 256, 512, 150))
    states, outputs = torch.randn(2, 3, 256), torch.randn(1, 256)
    starts = [ChainStart([3 + n] * (n + 1), 0, 4, 1.0, 1.0, 0.0) for n in range(3)]
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(draft_chains(states, outputs, starts, weights, *LIMITS, 4))
    for one, two, five in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, five)


@pytest.mark.timeout(120)
def test_threads_agree_on_which_steps_only_feed() -> None:
    """Each call has four steps that only feed, and one that drafts. A thread that takes one kind for the other waits
    for ever. There are more threads than processors, so that some come late."""
    torch.manual_seed(0)
    torch.set_num_threads(5)
    weights = packed(plain_weights(256, 256, 256, 512, 150))
    states, outputs = torch.randn(1, 3, 256), torch.empty(0, 256)
    start = ChainStart([3, 1, 4, 1, 5], 0, 1, 1.0, 1.0, 0.0)
    expected = draft_chains(states, outputs, [start], weights, *LIMITS, 1)
    for _ in range(300):
        found = draft_chains(states, outputs, [start], weights, *LIMITS, 1)
        assert torch.equal(found.outputs, expected.outputs)


@pytest.mark.parametrize(
    ("start", "length"),
    [
        (ChainStart([1], 0, 4, 1.0, 1.0, 0.0), 4),
        (ChainStart([1], 0, 3, 1.0, 1.0, 0.0), 3),
        (ChainStart([1], 0, 1, 1.0, 1.0, 0.0), 1),
        (ChainStart([1], 0, 4, 1.0, 1.0, 0.24), 3),  # 0.5 and 0.25 go on, 0.125 ends
        (ChainStart([1], 0, 4, 1.0, 1.0, 0.26), 2),
        (ChainStart([1], 0, 4, 1.0, 1.0, 0.51), 1),
        (ChainStart([1], 0, 4, 0.5, 1.0, 0.24), 2),
        (ChainStart([1, 2, 3], 0, 4, 0.5, 1.0, 0.24), 2),  # tokens that are fed cost no survival
        (ChainStart([1], 0, 4, 1.0, 1.5, 0.26), 4),  # 0.75, 0.56, 0.42
        (ChainStart([1], 0, 4, 1.0, 0.5, 0.05), 3),
        (ChainStart([1], 0, 4, 1.0, 3.0, 0.9985), 2),  # a factor makes no draft more probable than 0.999
    ],
)
def test_a_chain_ends_with_the_draft_that_takes_survival_below_the_least(start: ChainStart, length: int) -> None:
    chains = draft_chains(torch.randn(1, 3, 6), torch.empty(0, 8), [start], certain(0.5), *LIMITS, 4)
    assert chains.lengths.tolist() == [length]
    assert chains.probabilities[0].tolist() == pytest.approx([0.5] * length + [0.0] * (4 - length))
    assert (chains.tokens[0] >= 0).tolist() == [True] * length + [False] * (4 - length)
    assert chains.outputs[0].any(-1).tolist() == [True] * length + [False] * (4 - length)


def test_no_sequence_gives_no_chain() -> None:
    chains = draft_chains(torch.empty(0, 3, 6), torch.empty(0, 8), [], certain(0.5), *LIMITS, 4)
    assert chains.tokens.shape == (0, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fuse": ops.pack_linear}, r"fuse is a matrix \[8, 14\], want \[8, 24\]"),
        ({"down": lambda _: torch.randn(8, 12)}, "down is not a packed matrix"),
        ({"norm": lambda _: torch.randn(7)}, r"norm must be contiguous with shape \[8\], got \[7\]"),
        ({"bias": lambda _: torch.randn(19)}, r"the bias of rows must be .* \[20\], got \[19\]"),
        ({"embedding": lambda e: e.double()}, "embedding must be float32, float16 or bfloat16"),
        ({"embedding": lambda e: e.T}, "embedding must be contiguous"),
        ({"embedding": lambda e: e[:, :5].contiguous()}, r"fuse is a matrix \[8, 24\], want \[8, 23\]"),
        ({"embedding": lambda e: e[:120]}, r"draft token 1[2-4]\d is outside \[0, 120\)"),
        ({"vocabulary": lambda v: v.int()}, "vocabulary must be a contiguous int64 vector"),
        ({"vocabulary": lambda v: v[:1]}, "vocabulary has 1 tokens, want at least 2"),
        ({"vocabulary": lambda v: v[:9]}, r"rows is a matrix \[20, 8\], want \[9, 8\]"),
    ],
)  # fmt: skip
def test_wrong_weights_are_named(changes: dict, message: str) -> None:
    torch.manual_seed(0)
    weights = certain(0.5)
    [(name, change)] = changes.items()
    old = torch.randn(8, 14) if name == "fuse" else getattr(weights, name)
    wrong = replace(weights, **{name: change(old)})
    start = ChainStart([1], 0, 4, 1.0, 1.0, 0.0)
    with pytest.raises(RuntimeError, match=message):
        draft_chains(torch.randn(1, 3, 6), torch.empty(0, 8), [start], wrong, *LIMITS, 4)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"tokens": []}, "sequence 0 has 0 of 0 tokens"),
        ({"tokens": [VOCABULARY]}, r"token 150 is outside \[0, 150\)"),
        ({"tokens": [3, -1]}, "token -1 is outside"),
        ({"room": 0}, "room for 0 drafts"),
        ({"room": 5}, "room for 5 drafts from place 0 on, want 1 to 4"),
        ({"place": -1}, "from place -1 on"),
    ],
)
def test_wrong_starts_are_named(start: dict, message: str) -> None:
    wrong = ChainStart([1], 0, 4, 1.0, 1.0, 0.0)._replace(**start)
    with pytest.raises(RuntimeError, match=message):
        draft_chains(torch.randn(1, 3, 6), torch.empty(0, 8), [wrong], certain(0.5), *LIMITS, 4)


def test_wrong_states_are_named() -> None:
    weights, start = certain(0.5), ChainStart([1], 0, 4, 1.0, 1.0, 0.0)
    for states, outputs, message in (
        (torch.randn(1, 2, 6), torch.empty(0, 8), r"states has shape \[1, 2, 6\], want"),
        (torch.randn(1, 3, 6).half(), torch.empty(0, 8), "states must be float32"),
        (torch.randn(1, 3, 6), torch.randn(1, 8), "2 sequences, but 1 counts"),
        (torch.empty(0, 3, 6), torch.randn(1, 9), "want"),
    ):
        with pytest.raises(RuntimeError, match=message):
            draft_chains(states, outputs, [start], weights, *LIMITS, 4)
