"""Tiny random-weight models of the families we promise, built from their Hugging Face classes."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf
from _pytest.mark import ParameterSet

from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from tests.tiers import tiered

VOCABULARY_SIZE = 97
NUM_LAYERS = 6
SHARED = {
    "vocab_size": VOCABULARY_SIZE,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
LLAMA_LIKE = {
    **SHARED,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# The length at which the families of `BORDERED` change what they compute; their windows are shorter.
BORDER = 12
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.5, 5.0, 6.5],
    "original_max_position_embeddings": BORDER,
}
ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)


def _llama_like(config: type, **changes: object) -> hf.PretrainedConfig:
    return config(**{**LLAMA_LIKE, **changes})


def gemma4(full_key_heads: int = 1, **changes: object) -> hf.PretrainedConfig:
    """Heads of the full layers are wider, so that not all layers have the same configuration. Without `changes` their
    keys are their values, as in the largest ones."""
    usual = {
        "head_dim": 8,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": full_key_heads,
        "sliding_window": 5,
        "layer_types": ALTERNATING,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    }
    return _llama_like(hf.Gemma4TextConfig, **{**usual, **changes})


FAMILIES: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "llama": lambda: _llama_like(hf.LlamaConfig),
    "llama-tied": lambda: _llama_like(hf.LlamaConfig, tie_word_embeddings=True),
    "deepseek-r1-distill-llama": lambda: _llama_like(
        hf.LlamaConfig,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "deepseek-r1-distill-qwen": lambda: _llama_like(
        hf.Qwen2Config, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    ),
    "qwen2.5": lambda: _llama_like(hf.Qwen2Config, tie_word_embeddings=True),
    "qwen2-sliding": lambda: _llama_like(
        hf.Qwen2Config, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
    "qwen3": lambda: _llama_like(hf.Qwen3Config, head_dim=8),
    "mistral": lambda: _llama_like(hf.MistralConfig, sliding_window=None, head_dim=8),
    "mistral-sliding": lambda: _llama_like(hf.MistralConfig, sliding_window=5, head_dim=8),
    "mixtral": lambda: _llama_like(hf.MixtralConfig, num_local_experts=4),
    "qwen3-moe": lambda: _llama_like(
        hf.Qwen3MoeConfig,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    # Sinks, and experts with biases, whose matrices are turned and whose gates are interleaved and clamped.
    "gpt-oss-sliding": lambda: _llama_like(
        hf.GptOssConfig,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        layer_types=ALTERNATING,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "gemma3-sliding": lambda: _llama_like(
        hf.Gemma3TextConfig, head_dim=8, sliding_window=5, layer_types=ALTERNATING, query_pre_attn_scalar=8
    ),
    "gemma4": gemma4,
    # As E2B and E4B: the last layers read the keys and values of earlier ones, and each is given something of a token.
    "gemma4-sliding": lambda: gemma4(
        attention_k_eq_v=False,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY_SIZE,
        use_double_wide_mlp=True,
    ),
    "gemma4-experts": lambda: gemma4(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=24),
    "gpt2": lambda: hf.GPT2Config(n_embd=32, n_layer=NUM_LAYERS, n_head=4, n_positions=128, **SHARED),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**{k: v for k, v in LLAMA_LIKE.items() if k != "num_key_value_heads"}),
    "phi2": lambda: _llama_like(hf.PhiConfig),
    "phi3": lambda: _llama_like(hf.Phi3Config),
    "phi3-sliding": lambda: _llama_like(hf.Phi3Config, sliding_window=5),
    # `generate` reads all tokens again when they outgrow the short factors.
    "phi3-longrope": lambda: _llama_like(
        hf.Phi3Config, original_max_position_embeddings=BORDER, rope_parameters=LONGROPE
    ),
    "phimoe-longrope": lambda: _llama_like(
        hf.PhimoeConfig,
        num_local_experts=4,
        original_max_position_embeddings=BORDER,
        rope_parameters={**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
    ),
    # It goes on over keys with the short ones.
    "llama-longrope": lambda: _llama_like(hf.LlamaConfig, rope_parameters=LONGROPE),
    "ministral3": lambda: _llama_like(
        hf.Ministral3Config,
        head_dim=8,
        sliding_window=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": BORDER,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.9,
        },
    ),
    "llama4": lambda: _llama_like(
        hf.Llama4TextConfig,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        num_experts_per_tok=1,
        floor_scale=BORDER,
        attn_scale=0.9,
        attention_chunk_size=2 * BORDER,
        no_rope_layers=[1, 0] * (NUM_LAYERS // 2),
    ),
    "falcon": lambda: hf.FalconConfig(
        hidden_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        new_decoder_architecture=True,
        num_kv_heads=2,
        max_position_embeddings=128,
        **SHARED,
    ),
    "falcon-alibi": lambda: hf.FalconConfig(
        hidden_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        new_decoder_architecture=False,
        multi_query=False,
        parallel_attn=False,
        alibi=True,
        bias=True,
        **SHARED,
    ),
    "opt": lambda: hf.OPTConfig(
        hidden_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=128,
        word_embed_proj_dim=16,
        init_std=0.3,
        dropout=0.0,
        **{k: v for k, v in SHARED.items() if k != "initializer_range"},
    ),
}


# These differ most in what neap does. `make test` asks them; `make test-full` asks all others, too.
USUAL = {"llama", "gpt2", "mixtral", "gemma3-sliding", "gemma4-sliding", "phi3-longrope"}


def by_tier(names: Iterable[str]) -> list[ParameterSet]:
    """Parameters of a test: those that are not in USUAL are of the full tier."""
    return tiered(names, USUAL)


# Families whose configuration names a position where behaviour changes, all before position 2 * BORDER.
BORDERED = [name for name in sorted(FAMILIES) if name.endswith(("-longrope", "-sliding"))]
BORDERED += ["ministral3", "llama4"]
# Angles or scales that transformers chooses for a whole batch: a row's answers depend on the others'.
DEPENDS_ON_COMPANY = {"phi3-longrope", "phimoe-longrope", "llama-longrope", "llama4"}


def build_family(name: str, **changes: object) -> hf.PreTrainedModel:
    """A model whose every parameter matters: biases and norm weights are not left at zero or one. `changes`: to its
    configuration."""
    torch.manual_seed(0)
    config = FAMILIES[name]()
    config.update(changes)
    model = hf.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.std() < 0.05:
                parameter.normal_(0, 0.2)
    return model


def load_family(folder: Path, name: str, dtype: torch.dtype, **options: Any) -> LoadedModel:
    """A family's model with its weights in `dtype`, written to `folder` and loaded from there, without a tokenizer."""
    torch.manual_seed(0)
    build_family(name).to(dtype).save_pretrained(folder)
    with patch("shared.model.load.AutoTokenizer.from_pretrained", lambda **_: None):
        return load_model(folder, **options)
