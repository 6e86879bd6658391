"""Models whose matrices are multiplied by rounded inputs: those in bfloat16 by bfloat16, GGUF's blocks by 8 bits."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from shared.errors import UnsupportedModel
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.load import load_model
from shared.model.loaded import LoadedModel, wrap_model
from shared.model.numerics import numerics_of
from tests.families import VOCABULARY_SIZE, build_family, load_family
from tests.gguf_files import write_llama
from tests.tiers import tiered

IDS = torch.arange(2, 22)[None] % VOCABULARY_SIZE


def _states(loaded: LoadedModel, parts: list[int]) -> Tensor:
    """The states of IDS [20, D] in passes of `parts` tokens."""
    runner = ContiguousRunner(loaded)
    cache, states, base = runner.new_cache(20), [], 0
    for part in IDS.split(parts, 1):
        states.append(runner.run(part, cache, first=0, last=runner.num_layers, base=base)[0])
        base += part.shape[1]
    return torch.cat(states)


@torch.no_grad()
def _logits_with_rounded_inputs(loaded: LoadedModel) -> Tensor:
    """What transformers' own modules compute with the weights of `loaded` if the inputs of their matmuls are
    rounded."""
    model = loaded.model
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            module.register_forward_pre_hook(lambda _, args: (args[0].bfloat16().float(),))
    return model(input_ids=IDS).logits


# Llama's layers are one op each, GPT-2's run by modules and store their weights transposed.
@pytest.mark.parametrize("family", tiered(["llama", "gpt2", "phi3"], {"llama"}))
def test_matmuls_round_their_inputs(family: str, tmp_path: Path) -> None:
    def load(**options: object) -> LoadedModel:
        return load_family(tmp_path, family, torch.bfloat16, **options)

    rounded, plain = load(compute_dtype=torch.bfloat16), load()
    assert (rounded.compute_dtype, plain.compute_dtype) == (torch.bfloat16, torch.float32)
    assert rounded.fingerprint == plain.fingerprint == plain.text_fingerprint
    assert rounded.text_fingerprint != plain.text_fingerprint
    expected = _logits_with_rounded_inputs(load(accelerate=False))
    with torch.no_grad():
        logits, exact = (loaded.model(input_ids=IDS).logits for loaded in (rounded, plain))
    error = (logits - expected).norm() / expected.norm()
    without = (exact - expected).norm() / expected.norm()
    assert error < 0.3 * without
    assert without < 0.05


@pytest.mark.parametrize("family", tiered(["llama", "gpt2"], {"gpt2"}))
def test_passes_of_any_size_agree(family: str, tmp_path: Path) -> None:
    loaded = load_family(tmp_path, family, torch.bfloat16, compute_dtype=torch.bfloat16)
    assert numerics_of(ContiguousRunner(loaded)).is_exact
    assert torch.equal(_states(loaded, [7, 1, 9, 1, 2]), _states(loaded, [20]))


# The types of a common Q4_K_M file, one of small blocks, and plain ones.
KINDS = {
    "token_embd": Kind.Q6_K,
    "attn_q": Kind.Q4_K,
    "attn_k": Kind.Q5_0,
    "attn_v": Kind.Q6_K,
    "attn_output": Kind.F16,
    "ffn_gate": Kind.Q4_K,
    "ffn_up": Kind.Q6_K,
}


@pytest.mark.parametrize("kinds", [KINDS, Kind.Q8_0, Kind.Q4_1], ids=["mixed", "Q8_0", "Q4_1"])
def test_blocks_are_multiplied_by_bytes_in_passes_of_any_size(kinds: Kind | dict[str, Kind], tmp_path: Path) -> None:
    file = write_llama(tmp_path / "tiny.gguf", kinds, width=256, inner=256)
    rounded, plain = (load_model(file, compute_dtype=dtype) for dtype in (None, torch.float32))
    assert rounded.fingerprint == plain.fingerprint == plain.text_fingerprint
    assert rounded.text_fingerprint.endswith("/int8")
    states, exact = (_states(loaded, [20]) for loaded in (rounded, plain))
    error = (states - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.03
    assert torch.equal(_states(rounded, [7, 1, 9, 1, 2]), states)
    tried = numerics_of(ContiguousRunner(rounded))
    assert tried.is_exact
    assert tried.id != numerics_of(ContiguousRunner(plain)).id


def test_a_model_that_cannot_be_multiplied_so_is_refused(tmp_path: Path) -> None:
    wanted = torch.bfloat16
    for accelerate in (True, False):
        with pytest.raises(UnsupportedModel, match="cannot be multiplied in bfloat16") as refused:
            wrap_model(build_family("llama"), accelerate=accelerate, compute_dtype=wanted)
        assert refused.value.reason == "COMPUTE_DTYPE_NOT_SUPPORTED"
    with pytest.raises(UnsupportedModel, match="cannot be multiplied in bfloat16"):
        load_family(tmp_path, "llama", torch.float16, compute_dtype=wanted)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(UnsupportedModel, match="cannot be multiplied in int8"):
            load_family(tmp_path, "llama", dtype, compute_dtype=torch.int8)
    file = write_llama(tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedModel, match="cannot be multiplied in bfloat16"):
        load_model(file, compute_dtype=torch.bfloat16)
