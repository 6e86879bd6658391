"""Writes a .gguf file of a published model's shape with random weights: for starts, memory and speed at real sizes.
Shapes of families that such files are not read of become a folder in bfloat16.

    python -m bench.shapes llama-8b FILE.gguf --tokenizer OTHER.gguf [--format BF16]
    python -m bench.shapes phi-2 FOLDER --tokenizer OTHER.gguf

Blocks of 4 to 8 bits get random bits and scales with which weights are about as large as those of a fresh model, so
numbers stay finite, and every matrix has the format that llama.cpp's Q4_K_M gives it. The vocabulary is that of
--tokenizer, cut or filled up to the model's size. What such a model writes means nothing.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES

from bench.options import make_parser
from shared.model.weights.files import StableFile
from shared.model.weights.gguf_file import read_contents
from shared.model.weights.gguf_rope import llama3_factors

NORM = 1e-5
# The scales of a block, by its kind: their places, and their values where a row has one input. Of 4 bits the second one
# is that of what is subtracted, so that the mean is 0; the deviations of random blocks were counted.
SCALES = {
    Kind.Q4_K: ((0, 1 / 258), (2, 7.5 / 258)),
    Kind.Q5_K: ((0, 1 / 527), (2, 15.5 / 527)),
    Kind.Q6_K: ((208, 1 / 1368),),
    Kind.Q5_0: ((0, 1 / 9.23),),
    Kind.Q8_0: ((0, 1 / 73.9),),
}
# What llama.cpp takes where rows do not divide into blocks of 256.
NARROW = {Kind.Q4_K: Kind.Q5_0, Kind.Q6_K: Kind.Q8_0}


@dataclass(frozen=True)
class Shape:
    """As in a Hugging Face config. `has_qk_norm`: whether each head's queries and keys are normalised.
    `llama3_factor`: that of Llama 3.1's scaling of rotary embeddings; 0: there is none. `window`: that of most layers;
    0: all see everything. `has_added_norms`: whether what attention and the MLP add is normed. `is_tied`: whether the
    head is the embedding. `num_experts`: each with `inner` rows; 0: there is one MLP. `full_head_dim`: of each fifth
    layer, which sees everything; 0: all heads are alike. `num_sharing`: the last layers, which read the keys and values
    of others and have twice as many `inner` rows. `layer_width`: of what each layer gets of a token for itself."""

    architecture: str
    num_layers: int
    width: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    rope_theta: float
    has_qk_norm: bool = False
    llama3_factor: float = 0.0
    window: int = 0
    has_added_norms: bool = False
    is_tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    full_head_dim: int = 0
    num_sharing: int = 0
    layer_width: int = 0


GEMMA3: dict[str, Any] = {"window": 512, "has_qk_norm": True, "has_added_norms": True, "is_tied": True}
GEMMA4: dict[str, Any] = {**GEMMA3, "full_head_dim": 512, "layer_width": 256}
MOE: dict[str, Any] = {"has_qk_norm": True, "num_experts": 128, "experts_per_token": 8}
GPT_OSS: dict[str, Any] = {"num_experts": 32, "experts_per_token": 4, "window": 128}
SHAPES = {
    # DeepSeek-R1-Distill-Llama-8B, which is Llama 3.1 8B.
    "llama-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 500000.0, llama3_factor=8.0),
    "llama-3.2-1b": Shape(
        "llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 500000.0, llama3_factor=32.0, is_tied=True
    ),
    "gemma3-270m": Shape("gemma3", 18, 640, 2048, 4, 1, 256, 262144, 32768, 1000000.0, **GEMMA3),
    "gemma3-1b": Shape("gemma3", 26, 1152, 6912, 4, 1, 256, 262144, 32768, 1000000.0, **GEMMA3),
    "gemma4-e2b": Shape("gemma4", 35, 1536, 6144, 8, 1, 256, 262144, 131072, 1000000.0, **GEMMA4, num_sharing=20),
    # It has layer norms, biases, plain MLPs and an embedding of positions.
    "gpt2": Shape("gpt2", 12, 768, 3072, 12, 12, 64, 50257, 1024, 0.0, is_tied=True),
    # Five of the 48 layers of Qwen3-30B-A3B.
    "qwen3-moe": Shape("qwen3moe", 5, 2048, 768, 32, 4, 128, 151936, 40960, 1000000.0, **MOE),
    # As ggml-org publishes it: experts in MXFP4, and all other matrices in Q8_0.
    "gpt-oss-20b": Shape("gpt-oss", 24, 2880, 2880, 64, 8, 64, 201088, 131072, 150000.0, **GPT_OSS),
    "qwen3-8b": Shape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1000000.0, has_qk_norm=True),
}

FOLDERS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "pythia-410m": lambda: hf.GPTNeoXConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, vocab_size=50304
    ),
    "opt-1.3b": lambda: hf.OPTConfig(
        hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, ffn_dim=8192, word_embed_proj_dim=2048
    ),
    "phi-2": lambda: hf.PhiConfig(
        hidden_size=2560,
        num_hidden_layers=32,
        num_attention_heads=32,
        intermediate_size=10240,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4},
    ),
    # Half as wide as Mixtral 8x7B, and four of its 32 layers.
    "mixtral": lambda: hf.MixtralConfig(
        hidden_size=2048, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4, intermediate_size=7168
    ),
}

Tensor = tuple[str, tuple[int, ...], Kind]


def tensors(shape: Shape, plain: Kind | None) -> Iterator[Tensor]:
    """All of the file. `plain`: the format of all matrices; None: those of Q4_K_M."""

    is_gpt_oss = shape.architecture == "gpt-oss"

    def matrix(name: str, rows: int, columns: int, kind: Kind = Kind.Q4_K) -> Tensor:
        usual = Kind.Q8_0 if is_gpt_oss else NARROW[kind] if columns % 256 else kind
        return f"{name}.weight", (rows, columns), plain or usual

    def norm(name: str, size: int = shape.width) -> Tensor:
        return f"{name}.weight", (size,), Kind.F32

    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    has_biases, mlp_norm = shape.architecture == "gpt2", "post_attention_norm" if is_gpt_oss else "ffn_norm"
    yield matrix("token_embd", shape.vocabulary, shape.width, Kind.Q6_K if shape.is_tied else Kind.Q4_K)
    if not shape.is_tied:
        yield matrix("output", shape.vocabulary, shape.width, Kind.Q6_K)
    yield norm("output_norm")
    if has_biases:
        yield "output_norm.bias", (shape.width,), Kind.F32
        yield "position_embd.weight", (shape.context, shape.width), Kind.F32
    if shape.llama3_factor or shape.full_head_dim:
        yield norm("rope_freqs", (shape.full_head_dim or shape.head_dim) // 2)
    if shape.layer_width:
        of_all = shape.num_layers * shape.layer_width
        yield matrix("per_layer_token_embd", shape.vocabulary, of_all, Kind.Q5_K)
        yield "per_layer_model_proj.weight", (of_all, shape.width), plain or Kind.BF16
        yield norm("per_layer_proj_norm", shape.layer_width)
    eighth = shape.num_layers // 8
    for layer in range(shape.num_layers):
        # llama.cpp's rule for the layers whose values and last products get more bits.
        more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        block, precise = f"blk.{layer}.", Kind.Q6_K if more else Kind.Q4_K
        sees_all, shares = shape.full_head_dim and layer % 5 == 4, layer >= shape.num_layers - shape.num_sharing
        head = shape.full_head_dim if sees_all else shape.head_dim
        queries, keys, inner = shape.num_heads * head, shape.num_kv_heads * head, shape.inner * (1 + shares)
        yield norm(f"{block}attn_norm")
        yield norm(f"{block}{mlp_norm}")
        if shape.has_qk_norm:
            yield norm(f"{block}attn_q_norm", head)
            if not shares:
                yield norm(f"{block}attn_k_norm", head)
        if shape.has_added_norms:
            yield norm(f"{block}post_attention_norm")
            yield norm(f"{block}post_ffw_norm")
        if has_biases:
            sizes = {"attn_norm": shape.width, "ffn_norm": shape.width, "attn_qkv": queries + 2 * keys}
            sizes |= {"attn_output": shape.width, "ffn_up": shape.inner, "ffn_down": shape.width}
            yield from ((f"{block}{name}.bias", (size,), Kind.F32) for name, size in sizes.items())
            yield matrix(f"{block}attn_qkv", queries + 2 * keys, shape.width, Kind.Q5_K)
        else:
            yield matrix(f"{block}attn_q", queries, shape.width)
            if not shares:
                yield matrix(f"{block}attn_k", keys, shape.width)
                yield matrix(f"{block}attn_v", keys, shape.width, precise)
        yield matrix(f"{block}attn_output", shape.width, queries)
        mlp = [matrix(f"{block}ffn_{name}", inner, shape.width) for name in ("gate", "up")[has_biases:]]
        mlp.append(matrix(f"{block}ffn_down", shape.width, inner, precise))
        if shape.layer_width:
            yield matrix(f"{block}inp_gate", shape.layer_width, shape.width)
            yield matrix(f"{block}proj", shape.width, shape.layer_width)
            yield norm(f"{block}post_norm")
            yield norm(f"{block}layer_output_scale", 1)
        if shape.num_experts:
            yield f"{block}ffn_gate_inp.weight", (shape.num_experts, shape.width), Kind.F32
            own = plain or Kind.MXFP4
            mlp = [
                (name.replace(".weight", "_exps.weight"), (shape.num_experts, *s), own if is_gpt_oss else kind)
                for name, s, kind in mlp
            ]
        if is_gpt_oss:
            sizes = {"attn_q": queries, "attn_k": keys, "attn_v": keys, "attn_output": shape.width}
            sizes |= {"ffn_gate_inp": shape.num_experts}
            yield from ((f"{block}{name}.bias", (size,), Kind.F32) for name, size in sizes.items())
            yield f"{block}attn_sinks.weight", (shape.num_heads,), Kind.F32
            yield from ((name.replace("weight", "bias"), size[:2], Kind.F32) for name, size, _ in mlp)
        yield from mlp


def numbers(shape: Shape, tensor: Tensor, generator: np.random.Generator) -> np.ndarray:
    """float32 [N] of a norm; bytes [rows, bytes per row] of a matrix, of several [E, rows, bytes per row]."""
    name, size, kind = tensor
    if name == "rope_freqs.weight" and shape.full_head_dim:
        return np.where(np.arange(size[0]) < size[0] // 4, 1.0, 1e30).astype(np.float32)
    if name == "rope_freqs.weight":
        return llama3_factors(shape.rope_theta, shape.head_dim // 2, shape.llama3_factor).astype(np.float32)
    if shape.full_head_dim and name.endswith("attn_q_norm.weight"):  # Gemma 4 scales queries here alone
        return np.full(size, size[0] ** -0.5, np.float32)
    if len(size) == 1:
        return np.full(size, not name.endswith(".bias"), np.float32)
    *rows, columns = size
    if name.endswith(".bias"):
        return np.zeros(size, np.float32)
    if kind is Kind.F32:
        return generator.standard_normal(size, np.float32) / np.float32(columns**0.5)
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    if kind not in SCALES and kind is not Kind.MXFP4:
        weights = generator.standard_normal(size, np.float32) / np.float32(columns**0.5)
        quantised: np.ndarray = gguf.quantize(weights, kind)
        return quantised
    blocks = generator.integers(0, 256, (np.prod(size) // per_block, block_bytes), np.uint8)
    if kind is Kind.MXFP4:  # an exponent for floats whose deviation is 2.9
        blocks[:, 0] = 127 + round(math.log2(1 / (2.9 * columns**0.5)))
    for place, scale in SCALES.get(kind, ()):
        blocks[:, place : place + 2] = np.frombuffer(np.float16(scale / columns**0.5).tobytes(), np.uint8)
    return blocks.reshape(*rows, -1)


def add_tokenizer(writer: gguf.GGUFWriter, source: Path, size: int) -> None:
    with closing(StableFile(source)) as file:
        fields = read_contents(source, lambda _: file).fields
    values: dict[str, list[Any]] = {key.removeprefix("tokenizer.ggml."): field.values for key, field in fields.items()}
    texts = values["tokens"][:size]
    known = set(texts)
    writer.add_tokenizer_model(values["model"][0])
    writer.add_tokenizer_pre(values["pre"][0])
    writer.add_token_list([*texts, *(f"[PAD{number}]" for number in range(len(texts), size))])
    writer.add_token_types([*values["token_type"][:size], *[gguf.TokenType.UNUSED] * (size - len(texts))])
    merges = (merge for merge in values["merges"] if merge.replace(" ", "") in known)
    writer.add_token_merges([merge for merge in merges if known.issuperset(merge.split(" "))])
    writer.add_eos_token_id(min(values["eos_token_id"][0], size - 1))


def state_kinds(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """The statements of Gemma 4, whose layers are of several kinds."""
    writer.add_key_length_swa(shape.head_dim)
    writer.add_value_length_swa(shape.head_dim)
    writer.add_rope_dimension_count_swa(shape.head_dim)
    writer.add_rope_freq_base_swa(10000.0)
    writer.add_sliding_window_pattern([layer % 5 != 4 for layer in range(shape.num_layers)])
    writer.add_shared_kv_layers(shape.num_sharing)
    writer.add_embedding_length_per_layer_input(shape.layer_width)
    writer.add_final_logit_softcapping(30.0)


def write(shape: Shape, target: Path, tokenizer: Path, plain: Kind | None) -> None:
    writer = gguf.GGUFWriter(target, shape.architecture)
    writer.add_name(f"random {target.stem}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M if plain is None else gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.num_layers)
    own = shape.num_layers - shape.num_sharing
    inner = [shape.inner] * own + [2 * shape.inner] * shape.num_sharing
    writer.add_feed_forward_length(inner if shape.num_sharing else shape.inner)
    writer.add_head_count(shape.num_heads)
    if shape.rope_theta:
        head = shape.full_head_dim or shape.head_dim
        writer.add_head_count_kv(shape.num_kv_heads)
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_dimension_count(head)
        writer.add_rope_freq_base(shape.rope_theta)
        writer.add_layer_norm_rms_eps(NORM)
    else:
        writer.add_layer_norm_eps(NORM)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.full_head_dim:
        state_kinds(writer, shape)
    if shape.architecture == "gpt-oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    if shape.num_experts:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.experts_per_token)
        writer.add_expert_feed_forward_length(shape.inner)
    writer.add_vocab_size(shape.vocabulary)
    add_tokenizer(writer, tokenizer, shape.vocabulary)
    every = [*tensors(shape, plain)]
    for name, size, kind in every:
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = int(np.prod(size)) // per_block * block_bytes
        stored = size if kind is Kind.F32 else (*size[:-1], size[-1] // per_block * block_bytes)
        dtype = np.dtype(np.float32 if kind is Kind.F32 else np.uint8)
        writer.add_tensor_info(name, stored, dtype, num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    for tensor in every:
        writer.write_tensor_data(numbers(shape, tensor, generator))
    writer.close()


def write_folder(config: hf.PreTrainedConfig, target: Path, tokenizer: Path) -> None:
    hf.AutoTokenizer.from_pretrained(tokenizer.parent, gguf_file=tokenizer.name).save_pretrained(target)
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(target)


def main() -> None:
    parser = make_parser(__doc__, model=False)
    parser.add_argument("shape", choices=[*SHAPES, *FOLDERS])
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--format", choices=("Q4_K_M", "BF16"), default="Q4_K_M")
    options = parser.parse_args()
    if options.shape in FOLDERS:
        write_folder(FOLDERS[options.shape](), options.target, options.tokenizer)
        return
    plain = None if options.format == "Q4_K_M" else Kind.BF16
    write(SHAPES[options.shape], options.target, options.tokenizer, plain)


if __name__ == "__main__":
    main()
