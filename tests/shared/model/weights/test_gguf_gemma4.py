"""Gemma 4 in .gguf files, whose layers differ."""

from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from gguf import GGUFWriter

from shared.errors import Corrupt, UnsupportedModel
from shared.model.fingerprint import fingerprint
from shared.model.load import load_model
from tests.reasons import raises
from tests.shared.model.weights.test_gguf_families import BASE, Metadata, compare, llama_like, write


def gemma4(**changes: Any) -> tuple[str, Any, Metadata]:
    """Of the shape of E2B."""
    sizes = {**BASE, "num_hidden_layers": 6, "tie_word_embeddings": True, "sliding_window": 5, "head_dim": 8}
    sizes |= {"global_head_dim": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    sizes |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300, "final_logit_softcapping": 30.0}
    config = hf.Gemma4TextConfig(**sizes | {"layer_types": ["sliding_attention", "full_attention"] * 3} | changes)
    return "gemma4", config, lambda writer: state_gemma4(writer, config)


def state_gemma4(writer: GGUFWriter, config: Any) -> None:
    """As convert_hf_to_gguf.py states it."""
    llama_like(writer, 1e6, 1e-6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_sliding_window(5)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window_pattern(windows)
    for width, add in (
        (16, (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count)),
        (8, (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa)),
    ):
        for each in add:
            each(width)
    writer.add_final_logit_softcapping(30.0)
    if config.use_double_wide_mlp:
        writer.add_feed_forward_length([48] * 4 + [96] * 2)
    if config.attention_k_eq_v:
        writer.add_head_count_kv([2 if each else 1 for each in windows])
    if config.enable_moe_block:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(32)


CASES: dict[str, tuple[str, Any, Metadata]] = {
    "gemma4, layers that share keys": gemma4(),
    "gemma4, keys as values": gemma4(
        attention_k_eq_v=True, num_global_key_value_heads=1, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
        use_double_wide_mlp=False,
    ),
    "gemma4, experts": gemma4(
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32, num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, use_double_wide_mlp=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_the_model_that_was_written(tmp_path: Path, name: str) -> None:
    compare(tmp_path / "tiny.gguf", *CASES[name])


def test_the_scales_of_layers_count_to_the_fingerprint() -> None:
    _, config, _ = gemma4()
    model = hf.AutoModelForCausalLM.from_config(config).eval().float()
    before = fingerprint(model)
    model.model.layers[3].layer_scalar.fill_(0.5)
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("feed_forward_length", [48, 48, 48, 48, 96, 144]),
        ("feed_forward_length", [48, 48, 48, 48, 144, 144]),
        ("feed_forward_length", [48, 48, 48, 96, 96, 96]),
        ("attention.head_count_kv", [2, 1] * 3),
        ("attention.head_count_kv", [2, 2, 1, 2, 2, 2]),
        ("attention.value_length_swa", [16]),
        ("rope.dimension_count", [8]),
        ("attention.shared_kv_layers", [2, 2, 2, 2, 2, 1]),
    ],
)
def test_layers_of_gemma4_that_transformers_cannot_build_are_refused(tmp_path: Path, key: str, value: list) -> None:
    architecture, config, state = gemma4()

    def add_more(writer: GGUFWriter) -> None:
        state(writer)
        one = value[0] if len(value) == 1 else value
        writer.kv_data[0].pop(f"gemma4.{key}", None)
        (writer.add_array if one is value else writer.add_uint32)(f"gemma4.{key}", one)

    write(tmp_path / "tiny.gguf", architecture, config, add_more)
    with raises(UnsupportedModel, "FILE_KEY_UNKNOWN") as caught:
        load_model(tmp_path / "tiny.gguf")
    assert caught.value.metadata == {"key": f"gemma4.{key}"}


def test_a_file_that_says_too_little_of_its_layers_is_corrupt(tmp_path: Path) -> None:
    architecture, config, state = gemma4()

    def of_five(writer: GGUFWriter) -> None:
        state(writer)
        writer.add_sliding_window_pattern([True] * 5)

    def of_none(writer: GGUFWriter) -> None:
        state(writer)
        del writer.kv_data[0]["gemma4.rope.freq_base_swa"]

    for add_more, message in ((of_five, "for 5 of 6 layers"), (of_none, "no gemma4.rope.freq_base_swa")):
        write(tmp_path / "tiny.gguf", architecture, config, add_more)
        with raises(Corrupt, "MODEL_FILE_CORRUPT", match=message):
            load_model(tmp_path / "tiny.gguf")
