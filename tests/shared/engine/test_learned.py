"""Answers that teach a table: who is drafted for, that no token changes, and what is counted."""

import math
from collections.abc import Iterator

import pytest

from shared.engine.engine import Engine
from shared.engine.request.request import TokenChunk
from shared.errors import Cancelled
from shared.ladder.ladder import Ladder, ModelIdentity
from shared.ladder.policy import DepthPolicy
from shared.ladder.table_confidence import SIZES, TableConfidence
from shared.model.loaded import LoadedModel
from shared.model.sampling import SamplingParams
from tests.fixed_costs import fixed_cost_engine
from tests.known_answer import NUM_NEW, request

# With a limit of drafts the engine does not choose from its own speed whether to draft.
EXACT = DepthPolicy("exact", max_drafts=8)


@pytest.fixture
def ladder(loaded: LoadedModel) -> Ladder:
    """Drafts nothing of its own. Its router gives every match a probability of .9."""
    confidence = TableConfidence(math.log(9.0), [[0.0] * size for size in SIZES])
    return Ladder(ModelIdentity.of(loaded), ngram_confidence=confidence)


@pytest.fixture
def engine(loaded: LoadedModel, ladder: Ladder) -> Iterator[Engine]:
    with fixed_cost_engine(loaded, ladder, learned_bytes=1 << 16) as engine:
        yield engine


def answered(engine: Engine, **changes: object) -> tuple[list[int], int]:
    """The answer's tokens, and how many of them the learned table drafted."""
    tokens = []
    for event in engine.submit(request(**{"policy": EXACT, **changes})).events():
        if isinstance(event, TokenChunk):
            tokens += event.tokens
    return [token.token_id for token in tokens], sum(token.proposer == "learned" for token in tokens)


def test_a_clients_later_answers_are_drafted_and_the_same(engine, answer):
    first, _ = answered(engine, client="ann")
    again, num_drafted = answered(engine, client="ann")
    assert first == again == answer
    assert num_drafted > NUM_NEW // 2
    assert engine.statistics.accepted["learned"] >= num_drafted
    assert engine.num_learned_contexts > NUM_NEW // 2


def test_answers_draft_for_no_other_client(engine, answer):
    for client in ("ann", "bob", ""):
        assert answered(engine, client=client) == (answer, 0)
    assert engine.statistics.drafted["learned"] == 0


@pytest.mark.parametrize(
    "policy", [DepthPolicy("relaxed", threshold=0.5), DepthPolicy("relaxed", margin=0.0), DepthPolicy("full")]
)
def test_only_exact_answers_teach(engine, answer, policy):
    """Tokens of relaxed may be no choice of the full model. They are drafted, but not believed as a router's are."""
    assert answered(engine, client="ann", policy=policy) == (answer, 0)
    assert engine.num_learned_contexts == 0
    answered(engine, client="ann")
    tokens, num_drafted = answered(engine, client="ann", policy=policy)
    assert tokens == answer
    assert bool(num_drafted) == (policy.name == "relaxed")


def test_a_table_is_not_taught_what_relaxed_made_of_an_answer(loaded, ladder, answer):
    """Nor drafts it later what the full model did not choose."""
    relaxed = DepthPolicy("relaxed", margin=1e6, max_drafts=8)
    with fixed_cost_engine(loaded, ladder, learned_bytes=1 << 16) as engine:
        tokens, _ = answered(engine, client="ann", policy=relaxed, prediction_ids=(7,) * NUM_NEW)
        assert tokens != answer
        assert engine.num_learned_contexts == 0
        assert answered(engine, client="ann") == (answer, 0)


def test_nothing_is_learned_unless_the_engine_is_told_to(loaded, ladder, answer):
    with fixed_cost_engine(loaded, ladder) as engine:
        for _ in range(2):
            assert answered(engine, client="ann") == (answer, 0)
        assert engine.num_learned_contexts == 0


def test_sampled_answers_are_those_of_full_depth(engine):
    sampling = SamplingParams(temperature=1.0, seed=5)
    expected, _ = answered(engine, sampling=sampling, policy=DepthPolicy("full"))
    answered(engine, client="ann", sampling=SamplingParams(temperature=1.0, seed=6))
    for _ in range(2):
        drafted, num_drafted = answered(engine, client="ann", sampling=sampling)
        assert drafted == expected
    assert num_drafted


def test_a_cancelled_answer_teaches_nothing(engine, answer):
    handle = engine.submit(request(max_tokens=100, policy=EXACT, client="ann"))
    handle.next_event(60)
    handle.cancel()
    with pytest.raises(Cancelled):
        list(handle.events())
    assert answered(engine, client="ann") == (answer, 0)


def test_requests_of_several_clients_share_steps(engine, answer):
    for _ in range(2):
        clients = ["ann", "bob", "ann", "cid"]
        handles = [engine.submit(request(policy=EXACT, client=client)) for client in clients]
        for handle in handles:
            events = handle.events()
            tokens = [t.token_id for e in events if isinstance(e, TokenChunk) for t in e.tokens]
            assert tokens == answer
