"""Where no router is published, exact drafts by what needs none, and answers as full depth does."""

from shared.ladder.untrained import untrained_ladder
from tests.fixed_costs import fixed_cost_engine

# The tiny model repeats some of its text.
NUM_TOKENS = 120


def test_exact_drafts_without_a_router(loaded):
    with fixed_cost_engine(loaded, learned_bytes=1 << 16) as engine:
        full, exact = (engine.generate([5, 17, 3], policy=name, max_tokens=NUM_TOKENS) for name in ("full", "exact"))
        assert exact.token_ids == full.token_ids
        assert engine.proposer_names() == ("prompt-lookup", "learned")
        assert engine.proposer_names(untrained_ladder(loaded)) == ("prompt-lookup", "learned")
        counts = engine.statistics.by_version
    assert list(counts) == [0], "full depth counts for no version"
    assert counts[0].num_requests == 1
    assert counts[0].accepted["prompt-lookup"] >= 5


def test_a_published_ladder_is_another_one(loaded):
    with fixed_cost_engine(loaded) as engine:
        engine.generate([5, 17, 3], max_tokens=3)
        assert len(engine.ladders) == 1
        engine.prepare(untrained_ladder(loaded))
        assert len(engine.ladders) == 2
