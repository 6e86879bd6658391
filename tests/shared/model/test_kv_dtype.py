"""Models whose caches hold keys and values in 16 bits."""

import pytest
import torch
from torch import Tensor

from shared.errors import UnsupportedModel
from shared.model.cache import ContiguousCache
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.loaded import LoadedModel, wrap_model
from tests.families import VOCABULARY_SIZE, build_family

IDS = torch.arange(2, 22)[None] % VOCABULARY_SIZE


def _states(runner: ContiguousRunner, parts: list[int], cache: ContiguousCache) -> Tensor:
    """The states of IDS [20, D] in passes of `parts` tokens."""
    states, base = [], 0
    for part in IDS.split(parts, 1):
        states.append(runner.run(part, cache, first=0, last=runner.num_layers, base=base)[0])
        base += part.shape[1]
    return torch.cat(states)


def _load(family: str, kv_dtype: torch.dtype) -> LoadedModel:
    return wrap_model(build_family(family), accelerate=True, kv_dtype=kv_dtype)


# Llama's layers are one op each, GPT-2's run by modules.
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16])
def test_keys_and_values_are_rounded_once_so_passes_of_any_size_agree(family: str, kv_dtype: torch.dtype) -> None:
    runner = ContiguousRunner(_load(family, kv_dtype))
    cache, other = runner.new_cache(20), runner.new_cache(20)
    together = _states(runner, [20], cache)
    assert torch.equal(_states(runner, [7, 1, 9, 1, 2], other), together)
    # The first keys come from the embedding, before any attention: they are those of float32, rounded.
    plain = ContiguousCache(20)
    wide = _states(runner, [20], plain)
    assert plain.keys[0].dtype == torch.float32
    assert torch.equal(cache.keys[0], plain.keys[0].to(kv_dtype))
    assert not torch.equal(wide, together)
    torch.testing.assert_close(together, wide, atol=0.1 * float(wide.abs().max()), rtol=0.1)


@pytest.mark.parametrize(("family", "accelerate"), [("falcon", True), ("llama", False)])
def test_a_model_without_our_attention_is_refused(family: str, accelerate: bool) -> None:
    with pytest.raises(UnsupportedModel, match="cannot be kept in bfloat16") as refused:
        wrap_model(build_family(family), accelerate=accelerate, kv_dtype=torch.bfloat16)
    assert refused.value.reason == "KV_DTYPE_NOT_SUPPORTED"
    assert wrap_model(build_family(family), accelerate=accelerate).kv_dtype == torch.float32
