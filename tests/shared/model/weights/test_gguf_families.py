"""A model that is written as llama.cpp's converter writes it, and read here, gives the same logits."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import modeling_gguf_pytorch_utils as checkpoints

from shared.errors import Corrupt, NotFound, UnsupportedModel
from shared.model.load import load_model
from shared.model.remembered.key import files_of
from tests.gguf_files import write_llama
from tests.reasons import raises

BASE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 256,
    "bos_token_id": 256,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = {**BASE, "head_dim": 8, "tie_word_embeddings": True, "sliding_window": 5, "query_pre_attn_scalar": 8}
# Norms whose weights the converter writes with one added.
ADDS_ONE = ("gemma2", "gemma3", "nemotron")
Metadata = Callable[[GGUFWriter], object]


def rope(theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def write(
    path: Path,
    architecture: str,
    config: hf.PreTrainedConfig,
    add_more: Metadata,
    of_experts: tuple[Kind, Kind, Kind] = (Kind.F32,) * 3,
) -> hf.PreTrainedModel:
    """Writes random weights, and returns the model that has them. `of_experts`: the formats of gate, up and down of
    experts."""
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if "num_key_value_heads" in config.to_dict():
        writer.add_head_count_kv(config.to_dict()["num_key_value_heads"])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "<eos>", "he", "ll", *(f"[PAD{i}]" for i in range(config.vocab_size - len(letters) - 3))]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(letters) + [3] + [1] * (len(tokens) - len(letters) - 1))
    writer.add_token_merges(["h e", "l l"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_pad_token_id(0)
    add_more(writer)
    state = model.state_dict()
    # transformers asks for each module within a module, and gguf makes all names anew.
    with patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)):
        names = checkpoints.get_gguf_hf_weights_map(model, checkpoints.TensorProcessor())
    for name, parameter in names.items():
        if parameter in state and name.endswith((".weight", ".bias")):
            one = architecture in ADDS_ONE and "norm" in name and name.endswith("weight")
            transposed = architecture == "gpt2" and state[parameter].dim() > 1 and name.startswith("blk.")
            weights = state[parameter].T.contiguous() if transposed else state[parameter]
            writer.add_tensor(name, (weights + one).numpy().astype(np.float32))
    if architecture == "gemma4":  # a quarter of the pairs
        pairs = config.per_layer_config[5].head_dim // 2
        factors = np.where(np.arange(pairs) < pairs // 4, 1.0, 1e30)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for name, weights in state.items():
        layer = name.split(".")[2] if ".layers." in name else ""
        if name.endswith("layer_scalar"):
            weights.fill_(1.0 + 0.1 * int(layer))
            writer.add_tensor(f"blk.{layer}.layer_output_scale.weight", weights.numpy())
        if name.endswith(("router.scale", "router.per_expert_scale")):
            tensor = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            writer.add_tensor(f"blk.{layer}.{tensor}.scale", weights.numpy())
        if architecture == "gemma4" and ".experts." in name:
            tensor = "ffn_gate_up_exps" if "gate_up" in name else "ffn_down_exps"
            writer.add_tensor(f"blk.{layer}.{tensor}.weight", weights.numpy())
        if name.endswith("self_attn.sinks"):
            writer.add_tensor(f"blk.{layer}.attn_sinks.weight", weights.numpy())
        if name.endswith("mlp.experts.gate_up_proj_bias"):
            down = state[name.replace("gate_up", "down")]
            for part, biases in ("gate", weights[:, 0::2]), ("up", weights[:, 1::2]), ("down", down):
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.bias", biases.contiguous().numpy())
        if name.endswith("mlp.experts.gate_up_proj"):
            down = state[name.replace("gate_up", "down")]
            if architecture == "gpt-oss":  # turned, and gate and up in turn
                weights, down = weights.transpose(1, 2), down.transpose(1, 2)
                halves = weights[:, 0::2], weights[:, 1::2]
            else:
                halves = weights.chunk(2, 1)
            parts = ("gate", halves[0]), ("up", halves[1]), ("down", down)
            for (part, matrices), kind in zip(parts, of_experts, strict=True):
                numbers = gguf.quantize(matrices.contiguous().numpy(), kind)
                matrices.copy_(torch.from_numpy(gguf.dequantize(numbers, kind)))
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def llama_like(writer: GGUFWriter, theta: float = 1e4, eps: float = 1e-5) -> None:
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(eps)


def layer_norm(writer: GGUFWriter, theta: float, dimensions: int, eps: float = 1e-5) -> None:
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_eps(eps)
    writer.add_rope_dimension_count(dimensions)


def gemma(writer: GGUFWriter, theta: float = 1e4, **caps: float) -> None:
    llama_like(writer, theta, 1e-6)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_sliding_window(5)
    if caps:
        writer.add_attn_logit_softcapping(caps["attention"])
        writer.add_final_logit_softcapping(caps["final"])


def windowed_phi3(writer: GGUFWriter) -> None:
    llama_like(writer)
    writer.add_sliding_window(5)
    writer.add_rope_dimension_count(4)


def experts(writer: GGUFWriter, head: int = 8) -> None:
    llama_like(writer, 1e6, 1e-6)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(32)


def gpt_oss(writer: GGUFWriter) -> None:
    experts(writer, 16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_feed_forward_length(48)
    writer.add_rope_freq_base(1e4)
    writer.add_sliding_window(5)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


CASES: dict[str, tuple[str, hf.PreTrainedConfig, Metadata]] = {
    "qwen2": ("qwen2", hf.Qwen2Config(**BASE, **rope(1e6), rms_norm_eps=1e-3), lambda w: llama_like(w, 1e6, 1e-3)),
    "qwen3": (
        "qwen3",
        hf.Qwen3Config(**BASE, **rope(1e6), head_dim=16),
        lambda w: (llama_like(w, 1e6, 1e-6), w.add_key_length(16), w.add_value_length(16)),
    ),
    "qwen3moe": ("qwen3moe", hf.Qwen3MoeConfig(**BASE, **MOE, **rope(1e6), head_dim=8, norm_topk_prob=True), experts),
    "qwen3moe, wide heads": (
        "qwen3moe",
        hf.Qwen3MoeConfig(**BASE, **MOE, **rope(1e6), head_dim=16, norm_topk_prob=True),
        lambda w: experts(w, 16),
    ),
    "starcoder2": (
        "starcoder2",
        hf.Starcoder2Config(**BASE | {"tie_word_embeddings": True}, **rope(1e6), use_bias=True, norm_epsilon=1e-3),
        lambda w: layer_norm(w, 1e6, 8, 1e-3),
    ),
    "starcoder2 with a window": (
        "starcoder2",
        hf.Starcoder2Config(**BASE | {"tie_word_embeddings": True}, **rope(), use_bias=True, sliding_window=5),
        lambda w: (layer_norm(w, 1e4, 8), w.add_sliding_window(5)),
    ),
    "phi3": ("phi3", hf.Phi3Config(**BASE, **rope()), lambda w: (llama_like(w), w.add_rope_dimension_count(8))),
    "phi3, half rotated, with a window": (
        "phi3",
        hf.Phi3Config(**BASE, **rope(partial_rotary_factor=0.5), sliding_window=5),
        windowed_phi3,
    ),
    "stablelm": (
        "stablelm",
        hf.StableLmConfig(**BASE, **rope(1e6, partial_rotary_factor=0.5)),
        lambda w: layer_norm(w, 1e6, 4),
    ),
    "nemotron": (
        "nemotron",
        hf.NemotronConfig(**BASE, **rope(partial_rotary_factor=1.0), norm_eps=1e-3),
        lambda w: layer_norm(w, 1e4, 8, 1e-3),
    ),
    "gemma2": (
        "gemma2",
        hf.Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
        lambda w: gemma(w, attention=5.0, final=3.0),
    ),
    "gemma2 of 46 layers": (
        "gemma2",
        hf.Gemma2Config(**GEMMA | {"num_hidden_layers": 46, "head_dim": 16, "query_pre_attn_scalar": 8}),
        lambda w: (
            llama_like(w, 1e4, 1e-6),
            w.add_key_length(16),
            w.add_value_length(16),
            w.add_sliding_window(5),
            w.add_attn_logit_softcapping(50.0),
            w.add_final_logit_softcapping(30.0),
        ),
    ),
    "gemma3": (
        "gemma3",
        hf.Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 6}, rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }),
        lambda w: gemma(w, 1e6),
    ),
    "gpt-oss": (
        "gpt-oss",
        hf.GptOssConfig(**BASE, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
                "truncate": False,
            },
        ),
        gpt_oss,
    ),
    "gpt2": (
        "gpt2",
        hf.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=256),
        lambda w: w.add_layer_norm_eps(1e-5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_the_model_that_was_written(tmp_path: Path, name: str) -> None:
    compare(tmp_path / "tiny.gguf", *CASES[name])


def compare(file: Path, architecture: str, config: hf.PreTrainedConfig, add_more: Metadata) -> None:
    """Fails unless a model that is written to `file` and loaded from it gives its logits."""
    if architecture.startswith("gemma") and find_spec("transformers.integrations.gguf.gguf_tokenizer_mapping") is None:
        pytest.skip("this version of transformers takes no other tokenizer than Gemma's own")
    model = write(file, architecture, config, add_more)
    ids = torch.randint(300, (1, 24), generator=torch.Generator().manual_seed(1))
    loaded = load_model(file, accelerate=False)
    assert loaded.context_length == config.max_position_embeddings
    expected: Any = model
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, expected(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.scale", 1.0),
        ("llama.logit_scale", 8.0),
        ("llama.attention.sliding_window", 5),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.attention.value_length", 8),
        ("llama.rope.freq_base_swa", 2e4),
        ("llama.attention.causal", False),
        ("llama.never.heard.of", 1),
        ("tokenizer.ggml.never_heard_of", 1),
        ("tokenizer.ggml.add_sep_token", True),
        ("tokenizer.ggml.suppress_tokens", [1, 2]),
        ("llama.rope.dimension_sections", [4, 4, 0]),
    ],
)
def test_what_transformers_cannot_follow_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    add: dict[type, Any] = {
        float: GGUFWriter.add_float32,
        int: GGUFWriter.add_uint32,
        bool: GGUFWriter.add_bool,
        list: GGUFWriter.add_array,
    }
    file = write_llama(tmp_path / "tiny.gguf", add_more=lambda w: add[type(value)](w, key, value))
    with raises(UnsupportedModel, "FILE_KEY_UNKNOWN") as caught:
        load_model(file)
    assert caught.value.metadata == {"key": key}
    assert key in caught.value.message


def test_values_that_change_nothing_are_taken(tmp_path: Path) -> None:
    def add_more(writer: GGUFWriter) -> None:
        writer.add_attention_scale(16**-0.5)
        writer.add_logit_scale(1.0)
        writer.add_sliding_window(4096)
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_uint32("tokenizer.ggml.fim_pre_token_id", 1)
        writer.add_string("general.quantized_by", "somebody")
        writer.add_string("others.key", "value")

    expected = load_model(write_llama(tmp_path / "plain.gguf"))
    loaded = load_model(write_llama(tmp_path / "tiny.gguf", add_more=add_more))
    assert loaded.fingerprint == expected.fingerprint


def test_the_settings_of_sampling_are_requests_defaults(tmp_path: Path) -> None:
    def add_more(writer: GGUFWriter) -> None:
        for key, value in (
            ("temp", 0.5),
            ("top_p", 0.75),
            ("min_p", 0.25),
            ("penalty_repeat", 1.25),
            ("xtc_threshold", 1),
        ):
            writer.add_float32(f"general.sampling.{key}", value)
        writer.add_int32("general.sampling.top_k", 20)

    loaded = load_model(write_llama(tmp_path / "tiny.gguf", add_more=add_more))
    stated = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.25}
    assert loaded.defaults.sampling == stated


def test_an_old_files_linear_scaling_is_read(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "tiny.gguf", add_more=lambda w: w.add_float32("llama.rope.scale_linear", 4.0))
    rope_parameters = load_model(file).model.config.rope_parameters
    assert rope_parameters["rope_type"] == "linear"
    assert rope_parameters["factor"] == 4.0


def test_a_file_that_is_called_mistral_is_read_as_what_it_is(tmp_path: Path) -> None:
    file = write_llama(tmp_path / "tiny.gguf", name="mistral")
    expected = load_model(write_llama(tmp_path / "other.gguf"))
    assert load_model(file).fingerprint == expected.fingerprint


@pytest.mark.parametrize("left_out", ["embedding_length", "block_count", "attention.head_count"])
def test_a_file_without_sizes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    """Transformers would build a model of seven billion numbers."""
    add = GGUFWriter.add_uint32
    monkeypatch.setattr(
        GGUFWriter, "add_uint32", lambda w, key, *rest: key == f"llama.{left_out}" or add(w, key, *rest)
    )
    file = write_llama(tmp_path / "tiny.gguf")
    with raises(Corrupt, "MODEL_FILE_CORRUPT") as caught:
        load_model(file)
    assert left_out in caught.value.message


def split(file: Path, count: int) -> list[Path]:
    """The parts of the file, as llama.cpp's gguf-split writes them: the first has the metadata."""
    reader = gguf.GGUFReader(file)
    parts = [file.with_name(f"part-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    for number, part in enumerate(parts):
        writer = GGUFWriter(part, "llama")
        if number:
            del writer.kv_data[0]["general.architecture"]
        else:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    kind = field.types[0]
                    inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
                    writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def test_a_split_file_is_read_whole_whichever_part_is_named(tmp_path: Path) -> None:
    whole = write_llama(tmp_path / "tiny.gguf")
    parts = split(whole, 3)
    expected = load_model(whole).fingerprint
    assert {load_model(part).fingerprint for part in parts} == {expected}
    assert files_of(parts[1]) == tuple(parts)
    parts[2].rename(tmp_path / "away.gguf")
    with pytest.raises(NotFound, match="part-00003-of-00003"):
        load_model(parts[0])
    parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(Corrupt, match="part of a split file"):
        load_model(tmp_path / "other.gguf")
