"""Sequences in a ragged batch get the results that each gets alone."""

import pytest
import torch
from torch import Tensor

from shared.errors import InvalidInput
from shared.model.cache import ContiguousCache
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.model.ragged import RaggedCache, RaggedSequence
from shared.model.runner import Runner
from tests.families import FAMILIES, VOCABULARY_SIZE, build_family, by_tier

# Falcon does not use transformers' AttentionInterface.
# Llama 4 scales queries by the length of the cache, which a batch has not one of.
ONE_BY_ONE = {"falcon", "falcon-alibi", "llama4"}
SPLIT = 2


@pytest.fixture(params=by_tier(sorted(FAMILIES)))
def runner(request: pytest.FixtureRequest) -> Runner:
    return ContiguousRunner(wrap_model(build_family(request.param), accelerate=True))


def random_ids(length: int) -> Tensor:
    return torch.randint(2, VOCABULARY_SIZE, (1, length))


def test_ragged_batches_work_for_every_other_family(request, runner):
    name = request.node.callspec.params["runner"]
    assert runner.supports_ragged == (name not in ONE_BY_ONE)
    assert runner.counters.layer_executions == 0


def test_the_check_reads_the_beginning_of_a_sequence_once(monkeypatch):
    """What a sequence holds is copied for the batch."""
    passes = []
    run_all = ContiguousRunner._run_all

    def counted(self, ids, cache, base, read_length):
        passes.append(base)
        return run_all(self, ids, cache, base, read_length)

    monkeypatch.setattr(ContiguousRunner, "_run_all", counted)
    assert ContiguousRunner(wrap_model(build_family("llama"), accelerate=True)).supports_ragged
    assert passes.count(0) * 2 == len(passes) >= 8


def test_company_changes_nothing(runner):
    """Sequences of different lengths, longer than any window, split by depth, with a pass rolled back."""
    if not runner.supports_ragged:
        pytest.skip("goes one by one")
    held, new = (17, 1, 9), (1, 6, 3)
    ids = [random_ids(h + n) for h, n in zip(held, new, strict=True)]
    alone_caches = [runner.new_cache(32) for _ in ids]
    caches = [runner.new_cache(32) for _ in ids]
    depth = runner.num_layers
    for cache in (alone_caches, caches):
        for row, (tokens, length) in enumerate(zip(ids, held, strict=True)):
            runner.run(tokens[:, :length], cache[row], first=0, last=depth, base=0)
    expected = torch.cat(
        [
            runner.run(tokens[:, length:], cache, first=0, last=depth, base=length)
            for tokens, length, cache in zip(ids, held, alone_caches, strict=True)
        ],
        1,
    )
    sequences = [RaggedSequence(c, h, n) for c, h, n in zip(caches, held, new, strict=True)]
    wrong = torch.cat([random_ids(n) for n in new], 1)
    runner.run_ragged(wrong, sequences, first=0, last=depth)  # rolled back by the next pass, which has the same base
    together = torch.cat([tokens[:, h:] for tokens, h in zip(ids, held, strict=True)], 1)
    shallow = runner.run_ragged(together, sequences, first=0, last=SPLIT)
    deep = runner.run_ragged(together, sequences, first=SPLIT, last=depth, hidden=shallow)
    assert torch.equal(deep, expected)
    for cache, alone, tokens in zip(caches, alone_caches, ids, strict=True):
        assert set(cache.keys) == set(alone.keys)
        for layer in alone.keys:
            own, other = (one.keys[layer][:, :, : tokens.shape[1]] for one in (cache, alone))
            torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


def test_a_model_whose_attention_is_its_own_goes_one_by_one():
    assert not ContiguousRunner(wrap_model(build_family("llama"))).supports_ragged


def test_positions_past_a_cache_are_refused():
    with pytest.raises(InvalidInput, match="do not fit"):
        RaggedCache([RaggedSequence(ContiguousCache(4), 0, 4), RaggedSequence(ContiguousCache(4), 3, 2)])
