"""Small .gguf files: a random Llama with a byte vocabulary."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from tokenizers import pre_tokenizers

NUM_LAYERS = 2


def blocks(rows: int, columns: int, kind: Kind, seed: int) -> np.ndarray:
    """Random weights of this kind: float32 [rows, columns], or uint8 [rows, bytes per row]."""
    generator = np.random.default_rng(seed)
    if not kind.name.endswith("_K"):
        weights = generator.standard_normal((rows, columns), dtype=np.float32) / 8
        return gguf.quantize(weights, kind)
    # gguf writes no super-blocks. Any bits are valid but for the scales d and dmin, which must be small numbers.
    block, block_bytes = GGML_QUANT_SIZES[kind]
    made = generator.integers(0, 256, (rows * columns // block, block_bytes), np.uint8)
    scale = np.float16(0.001).tobytes()
    places = (208,) if kind == Kind.Q6_K else (0, 2)
    for place in places:
        made[:, place : place + 2] = np.frombuffer(scale, np.uint8)
    return made.reshape(rows, -1)


def write_llama(
    path: Path,
    kinds: Mapping[str, Kind] | Kind = Kind.Q8_0,
    *,
    width: int = 64,
    inner: int = 96,
    tied: bool = True,
    more_tokens: Mapping[str, gguf.TokenType] = MappingProxyType({}),
    name: str = "tiny",
    add_more: Callable[[GGUFWriter], object] = lambda _: None,
) -> Path:
    """Writes the file. `kinds`: that of all matrices, or by their names, or by a part such as "attn_q"; others Q8_0.
    `more_tokens`: of the vocabulary, with their kinds. `add_more` adds metadata and tensors."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "<eos>", "he", "ll", *more_tokens]
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(width // 4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - len(more_tokens)) + [int(kind) for kind in more_tokens.values()])
    writer.add_token_merges(["h e", "l l"])  # two, and a bos token: transformers 5.17 needs them
    writer.add_eos_token_id(len(letters))
    writer.add_bos_token_id(len(letters))
    seed = 0

    def add(name: str, rows: int, columns: int) -> None:
        nonlocal seed
        seed += 1
        kind = kinds if isinstance(kinds, Kind) else kinds.get(name, kinds.get(name.split(".")[-2], Kind.Q8_0))
        writer.add_tensor(name, blocks(rows, columns, kind, seed), raw_dtype=kind)

    add("token_embd.weight", len(tokens), width)
    if not tied:
        add("output.weight", len(tokens), width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(NUM_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.full(width, 0.5, np.float32))
        for name, rows, columns in (
            ("attn_q", width, width),
            ("attn_k", width // 2, width),
            ("attn_v", width // 2, width),
            ("attn_output", width, width),
            ("ffn_gate", inner, width),
            ("ffn_up", inner, width),
            ("ffn_down", width, inner),
        ):
            add(f"blk.{layer}.{name}.weight", rows, columns)
    add_more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
