"""Writes a Hugging Face folder of the llama architecture as a float32 .gguf file, which llama.cpp then quantises.

The names of tensors and the order of the rows of queries and keys are those of llama.cpp's own conversion: it rotates
neighbouring rows of a head together, Hugging Face the first half with the second.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from safetensors import safe_open

from shared.errors import UnsupportedModel

ARCHITECTURE = "llama"
# Prompts come as token ids, so the rule that splits text before it is tokenised does not matter; llama.cpp wants the
# name of one.
PRE_TOKENIZER = "gpt-2"


def write_gguf(folder: Path, target: Path) -> None:
    """Raises `UnsupportedModel` if the model is not a plain llama with a byte-level BPE tokenizer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _check(config)
    writer = gguf.GGUFWriter(target, ARCHITECTURE)
    _add_config(writer, config)
    _add_tokenizer(writer, folder, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in _tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise UnsupportedModel(f"llama.cpp has no name for the tensor {name}")
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f"{part}.weight" in name:
                tensor = interleaved(tensor, config[heads])
        writer.add_tensor(theirs, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: numpy.ndarray[Any, Any], num_heads: int) -> numpy.ndarray[Any, Any]:
    """`weight` [heads * width, D] -> the same, in each head row i of the first half followed by row i of the second."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def file_type(path: Path) -> str:
    """The type that a .gguf file says it mostly has, as in Q4_1. Raises `UnsupportedModel` if it says none."""
    field = gguf.GGUFReader(path).get_field("general.file_type")
    if field is None:
        raise UnsupportedModel(f"{path} does not say the type of its weights")
    return gguf.LlamaFileType(int(field.contents())).name.removeprefix("MOSTLY_")


def _check(config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    biased = config.get("attention_bias") or config.get("mlp_bias")
    if config.get("architectures") != ["LlamaForCausalLM"] or biased:
        raise UnsupportedModel("only llama models without biases can be converted for llama.cpp")
    if rope.get("rope_type", "default") != "default":
        raise UnsupportedModel("models with scaled rotary embeddings cannot be converted")


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocabulary_size: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    if tokenizer["model"]["type"] != "BPE" or tokenizer["model"].get("byte_fallback"):
        raise UnsupportedModel("only models with a byte-level BPE tokenizer can be converted")
    tokens = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    numbers = range(vocabulary_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list([tokens.get(number, f"[PAD{number}]") for number in numbers])
    writer.add_token_types([types.get(number, gguf.TokenType.UNUSED) for number in numbers])
    # Merges and the ids of special tokens.
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocabulary_size).add_to_gguf(writer)


def _tensors(folder: Path) -> Iterator[tuple[str, numpy.ndarray[Any, Any]]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                yield name, opened.get_tensor(name).to(torch.float32).numpy()
