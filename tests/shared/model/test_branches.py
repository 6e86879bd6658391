"""Branches of a pass, over contiguous and over paged caches: they have the states that they would have in the trunk's
place."""

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from shared.model.cache import KVCache
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import wrap_model
from shared.model.ragged import Branch, Move, RaggedSequence
from shared.model.runner import Runner
from tests.families import FAMILIES, VOCABULARY_SIZE, build_family, by_tier
from tests.paged import PAGED, load_family, make_runner

DIFFERS = 1e-4
# Experts are multiplied group by group, and the tokens in a group depend on all tokens of the pass.
INEXACT = {"mixtral", "qwen3-moe", "phimoe-longrope"}
# Longer than the windows of the families. Behind a window or a border, branches are what a chain would be.
LENGTHS = (3, 30)


@lru_cache(maxsize=1)
def runner_of(family: str, kind: str) -> Runner:
    if kind == "paged":
        return make_runner(load_family(family))
    return ContiguousRunner(wrap_model(build_family(family), accelerate=True))


def random_ids(length: int) -> Tensor:
    return torch.randint(2, VOCABULARY_SIZE, (1, length))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("family", by_tier(sorted(FAMILIES)))
def test_a_branch_has_the_states_that_it_would_have_in_its_place(family, kind, length):
    """And so has what comes after it, once it has been moved there. Others of the pass do not notice it."""
    if kind == "paged" and family not in PAGED:
        pytest.skip("it does not run over paged caches")
    runner = runner_of(family, kind)
    if not runner.supports_ragged:
        pytest.skip(f"{family} runs {runner.description}")
    depth, prompt = runner.num_layers, random_ids(length)
    trunk, own, read = random_ids(5), random_ids(5), length + 5
    branches = [Branch(length + 3, 2), Branch(length + 1, 3)]

    def held() -> KVCache:
        cache = runner.new_cache(60)
        runner.run(prompt, cache, first=0, last=depth, base=0, read_length=read)
        return cache

    def plain(cache: KVCache, tokens: Tensor, at: int) -> Tensor:
        return runner.run(tokens, cache, first=0, last=depth, base=at, read_length=read)[0]

    cache, other = held(), held()
    tree = RaggedSequence(cache, length, 10, tuple(branches), read)
    company = RaggedSequence(other, length, 5, read_length=read)
    ids = torch.cat([trunk, own, trunk], 1)
    states = runner.run_ragged(ids, [tree, company], first=0, last=depth)[0]
    expected = plain(held(), trunk, length)
    is_direct = kind == "paged" or runner.direct is not None
    exact = family not in INEXACT and is_direct
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(states[:5], expected, **close)
    torch.testing.assert_close(states[10:], expected, **close)
    start = 5
    for branch in branches:
        alone, place, end = held(), branch.base - length, start + branch.num_tokens
        path = torch.cat([trunk[:, :place], ids[:, start:end]], 1)
        found = plain(alone, path, length)[place:]
        torch.testing.assert_close(states[start:end], found, **close)
        assert (states[start] - expected[place]).abs().max() > DIFFERS, "its sibling's is another"
        start = end
    # The last branch is kept, but for its last token.
    runner.move([Move(cache, length + 7, length + 9, length + 1)])
    after, at = random_ids(3), length + 3
    torch.testing.assert_close(plain(cache, after, at), plain(alone, after, at), **close)
