"""Rotary embeddings of a .gguf file are scaled as the file says, or the file is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from shared.errors import UnsupportedModel
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from tests.gguf_files import write_llama
from tests.reasons import raises

PAIRS = 8
THETA = 10000.0
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SHORT, LONG = [1.0 + 0.1 * pair for pair in range(PAIRS)], [2.0 + pair for pair in range(PAIRS)]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.25,
}


def rotary(scaling: dict[str, Any] | None) -> Any:
    """Transformers' own rotary embedding of the files' models."""
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rope_theta=THETA,
            rope_scaling=scaling,
        )
    )


def llama3_factors() -> np.ndarray:
    """As llama.cpp's conversion writes them: by how much each frequency is lowered."""
    plain = THETA ** -(torch.arange(PAIRS, dtype=torch.float64) / PAIRS)
    return (plain / rotary(LLAMA3).inv_freq).numpy().round(4).astype(np.float32)


def add_llama3(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", llama3_factors())


def add_linear(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def add_yarn(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_rope_scaling_finetuned(True)


def add_longrope(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_rope_scaling_attn_factors(1.25)
    writer.add_tensor("rope_factors_short.weight", np.array(SHORT, np.float32))
    writer.add_tensor("rope_factors_long.weight", np.array(LONG, np.float32))


def add_unscaled(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_tensor("rope_freqs.weight", np.ones(PAIRS, np.float32))


def load(folder: Path, add_more: Callable[[GGUFWriter], object]) -> LoadedModel:
    return load_model(write_llama(folder / "tiny.gguf", add_more=add_more))


@pytest.mark.parametrize(
    ("add_more", "scaling"),
    [
        (lambda _: None, None),
        (add_unscaled, None),
        (add_llama3, LLAMA3),
        (add_linear, {"rope_type": "linear", "factor": 4.0}),
        (add_yarn, YARN),
        (add_longrope, LONGROPE),
    ],
)
def test_angles_are_those_of_the_same_config(
    tmp_path: Path, add_more: Callable[[GGUFWriter], object], scaling: dict[str, Any] | None
) -> None:
    module: Any = load(tmp_path, add_more).model
    states = torch.zeros(1, 128, 64)
    for length in (32, 128):  # within the first context length, and beyond it
        ids = torch.arange(length)[None]
        for ours, theirs in zip(module.model.rotary_emb(states, ids), rotary(scaling)(states, ids), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def add_other_factors(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", llama3_factors() ** 2)


def add_yarn_of_another_kind(writer: GGUFWriter) -> None:
    add_yarn(writer)
    writer.add_rope_scaling_yarn_log_mul(0.1)


def add_unknown_type(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


def add_two_kinds(writer: GGUFWriter) -> None:
    add_yarn(writer)
    add_llama3(writer)


@pytest.mark.parametrize("add_more", [add_other_factors, add_yarn_of_another_kind, add_unknown_type, add_two_kinds])
def test_other_scaling_is_refused(tmp_path: Path, add_more: Callable[[GGUFWriter], object]) -> None:
    with raises(UnsupportedModel, "ROPE_UNKNOWN"):
        load(tmp_path, add_more)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    with raises(UnsupportedModel, "TENSORS_LEFT_OUT", match=r"1 tensors .* blk\.0\.attn_q_norm\.weight"):
        load(tmp_path, lambda writer: writer.add_tensor("blk.0.attn_q_norm.weight", np.ones(16, np.float32)))
