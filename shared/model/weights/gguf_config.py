"""What a .gguf file states of its model, key by key: read, known to change nothing, or refused.

Transformers reads a few of these keys and leaves the others at its defaults, so that another model would answer. What
the keys mean is what llama.cpp does with them (`src/llama-model.cpp`, `convert_hf_to_gguf.py`).
"""

import math
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shared.errors import UnsupportedModel
from shared.model.weights.files import corrupt
from shared.model.weights.gguf_file import GgufContents
from shared.model.weights.gguf_gemma4 import KEYS as GEMMA4_KEYS
from shared.model.weights.gguf_gemma4 import gemma4_config
from shared.model.weights.gguf_rope import Numbers

# What a config calls the statement of a key, by the part after the architecture. The first name that the family's
# config has gets the value.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings", "seq_length"),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"),
    "rope.freq_base": ("rope_theta",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
}
# Values with which a key changes nothing, whether the family has a setting for it or not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attention.output_scale": (0.0, 1.0),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # softmax
    "interleave_moe_layer_step": (0, 1),
    "moe_every_n_layers": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "use_parallel_residual": (True,),  # said by families that have no other form here
    "swin_norm": (False,),
}
# They say how the file was made, or what the tensors show. Keys with a method of their own are in no table.
_IGNORED = frozenset({"tensor_data_layout", "expert_shared_count"})
# Families that look no further back than the window on all layers, or on those that the config names.
_WINDOWED = frozenset({"phi3", "gemma2", "gemma3", "gemma4", "starcoder2", "gpt-oss"})
# Families whose 27 B has another query scale, and how many layers that has.
_OTHER_SCALE = {"gemma2": 46, "gemma3": 62}
# Without them transformers would build a model of its default sizes.
_NEEDED = ("embedding_length", "block_count", "feed_forward_length", "attention.head_count")
# Architectures of which transformers makes configs itself, key by key, or whose layers differ in their sizes.
_OWN_CONFIG = frozenset({"qwen35", "qwen35moe", "lfm2", "deci", "mamba"})

# Settings of a generation_config, by the part after general.sampling. Those of llama.cpp alone, such as mirostat, are
# no part of one.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

_TOKENIZER_READ = frozenset({
    *("model", "pre", "tokens", "scores", "token_type", "merges", "add_bos_token", "add_eos_token", "add_space_prefix"),
    *(f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")),
})  # fmt: skip
_TOKENIZER_IGNORED = frozenset({
    *(f"{name}_token_id" for name in ("seperator", "separator", "cls", "mask", "prefix", "suffix", "middle")),
    *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
    "token_type_count",
})  # fmt: skip
_TOKENIZER_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_sep_token": (False,),
    "remove_extra_whitespaces": (False,),
    "precompiled_charsmap": (),
}


def complete_config(config: dict[str, Any], contents: GgufContents, numbers: Numbers) -> None:
    """Adds to the arguments of a config what the file states of the model beside the scaling of rotary embeddings.

    Raises `UnsupportedModel` (reason FILE_KEY_UNKNOWN) for a statement that transformers cannot follow or that is not
    known here, and `Corrupt` (MODEL_FILE_CORRUPT) if the file does not state the model's sizes.
    """
    architecture = contents.architecture
    _check_tokenizer(contents)
    if architecture in _OWN_CONFIG:
        return
    prefix = f"{architecture}."
    fields = {
        key.removeprefix(prefix): field.values for key, field in contents.fields.items() if key.startswith(prefix)
    }
    if missing := [name for name in _NEEDED if name not in fields]:
        raise corrupt(contents.path, f"its metadata has no {prefix}{missing[0]}")
    if architecture == "gemma4":
        config |= gemma4_config(contents, numbers)
        fields = {name: values for name, values in fields.items() if name not in GEMMA4_KEYS}
    stated = {name: _single(f"{prefix}{name}", values) for name, values in fields.items()}
    _Statements(architecture, stated, config).add()


class _Statements:
    """`stated`: by the key without the architecture."""

    def __init__(self, architecture: str, stated: dict[str, Any], config: dict[str, Any]) -> None:
        self._architecture, self._stated, self._config = architecture, stated, config
        usual: PretrainedConfig = CONFIG_MAPPING[config["model_type"]]()
        self._usual: Any = usual.get_text_config(decoder=True)
        heads = stated["attention.head_count"] or 1
        self._head_width: int = stated.get("attention.key_length") or stated["embedding_length"] // heads

    def add(self) -> None:
        for key, value in self._stated.items():
            special = getattr(self, f"_{key.replace('.', '_')}", None)
            if special is not None:
                special(value)
            elif not key.startswith("rope.scaling.") and key not in _IGNORED:
                self._name(key, value)
        if "query_pre_attn_scalar" in vars(self._usual) and "attention.scale" not in self._stated:
            is_other = self._stated["block_count"] == _OTHER_SCALE.get(self._architecture)
            per_head = self._stated["embedding_length"] // self._stated["attention.head_count"]
            self._config["query_pre_attn_scalar"] = per_head if is_other else self._head_width
        if self._config["model_type"] == "mistral":  # transformers guesses it by the file's name, with a window
            self._config["model_type"] = "llama"

    def _has(self, name: str) -> bool:
        if name == "rope_theta":
            return hasattr(self._usual, "rope_parameters")
        return hasattr(self._usual, name) or name in (getattr(self._usual, "rope_parameters", None) or {})

    def _name(self, key: str, value: Any) -> None:
        if value in _NEUTRAL.get(key, ()):
            return
        name = next((name for name in _NAMES.get(key, ()) if self._has(name)), None)
        if name is None:
            self._refuse(key, value)
        else:
            self._config[name] = value

    def _refuse(self, key: str, value: Any) -> None:
        raise UnsupportedModel(
            f"the file states {self._architecture}.{key} = {str(value)[:64]}, with which transformers would answer as "
            "another model",
            reason="FILE_KEY_UNKNOWN",
            metadata={"key": f"{self._architecture}.{key}"},
        )

    # Keys whose statement is not simply a setting's value.

    def _attention_key_length(self, value: int) -> None:
        if self._has("head_dim") or self._config.get("head_dim") == value:  # Qwen3-MoE's config has no usual value
            self._config["head_dim"] = value
        elif value * self._stated["attention.head_count"] != self._stated["embedding_length"]:
            self._refuse("attention.key_length", value)

    def _attention_value_length(self, value: int) -> None:
        if value != self._head_width:
            self._refuse("attention.value_length", value)

    def _attention_scale(self, value: float) -> None:
        if "query_pre_attn_scalar" in vars(self._usual) and value:
            self._config["query_pre_attn_scalar"] = round(value**-2)
        elif value and not math.isclose(value, self._head_width**-0.5, rel_tol=1e-5):
            self._refuse("attention.scale", value)

    def _attention_max_alibi_bias(self, value: float) -> None:
        if value != (8.0 if self._architecture == "bloom" else 0.0):
            self._refuse("attention.max_alibi_bias", value)

    def _attention_sliding_window(self, value: int) -> None:
        if value and self._architecture in _WINDOWED:
            self._config["sliding_window"] = value
        elif value and value < self._stated.get("context_length", math.inf):
            self._refuse("attention.sliding_window", value)

    def _rope_dimension_count(self, value: int) -> None:
        if self._has("partial_rotary_factor"):
            self._config["partial_rotary_factor"] = value / self._head_width
        elif self._has("rotary_dim"):
            self._config["rotary_dim"] = value
        elif value != self._head_width and hasattr(self._usual, "rope_parameters"):
            self._refuse("rope.dimension_count", value)

    def _rope_freq_base_swa(self, value: float) -> None:
        if self._has("rope_local_base_freq") or self._architecture.startswith("gemma3"):
            self._config["rope_local_base_freq"] = value
        elif value != self._stated.get("rope.freq_base"):
            self._refuse("rope.freq_base_swa", value)

    def _rope_scale_linear(self, value: float) -> None:
        """What files said before there was rope.scaling."""
        if value not in (0.0, 1.0):
            self._config["rope_scaling"] = {"rope_type": "linear", "factor": value}


def stated_sampling(contents: GgufContents) -> dict[str, Any]:
    """What of a generation_config the converter has written into the file."""
    fields = {name: contents.fields.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: field.values[0] for name, field in fields.items() if field is not None and field.values}


def _single(key: str, values: list[Any]) -> Any:
    """The value of all layers."""
    first = values[0] if values else None
    if any(value != first for value in values):
        raise UnsupportedModel(
            f"the file states {key} layer by layer, which transformers cannot follow",
            reason="FILE_KEY_UNKNOWN",
            metadata={"key": key},
        )
    return first


def _check_tokenizer(contents: GgufContents) -> None:
    prefix = "tokenizer.ggml."
    for key, field in contents.fields.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name in _TOKENIZER_READ | _TOKENIZER_IGNORED:
            continue
        if name not in _TOKENIZER_NEUTRAL or any(value not in _TOKENIZER_NEUTRAL[name] for value in field.values):
            raise UnsupportedModel(
                f"the file states {key}, which is not known here; its text would be split as by another model",
                reason="FILE_KEY_UNKNOWN",
                metadata={"key": key},
            )
