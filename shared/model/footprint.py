"""What a model will take, by the headers of its files, and the zeros and scales of AWQ and GPTQ."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import AutoConfig

from shared.model.borders import context_limit
from shared.model.parts import layer_configs
from shared.model.source import arguments_of
from shared.model.weights.files import parts_of
from shared.model.weights.gguf_file import read_contents
from shared.model.weights.quantised import quantisation
from shared.model.weights.reading import CheckpointFiles, SafetensorsReader, replaced, scheme_of
from shared.model.weights.schemes import Scheme
from shared.model.weights.stored import BLOCK_KINDS, LAZY_DTYPES, PLAIN_KINDS
from shared.ops.blocks import arranged_bytes
from shared.ops.paged_on_gpu import has_triton


@dataclass(frozen=True)
class Footprint:
    """Bytes: `weights`, as they are kept, of which the `largest` matrix; `kv_token`: keys and values of one token, over
    all layers; `head_row`: a row of logits in float32. `context_length` in tokens."""

    weights: int
    largest: int
    kv_token: int
    head_row: int
    context_length: int


class _Stored(NamedTuple):
    """A tensor in a file. `dtype`: None for blocks that are multiplied as they are, where `num_bytes` counts."""

    num_elements: int
    num_dimensions: int
    dtype: torch.dtype | None
    num_bytes: int
    arranged_bytes: int = 0  # of blocks, as a GPU keeps them


def footprint(
    source: str | Path,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    context_length: int | None = None,
) -> Footprint | None:
    """What `load_model` with the same arguments will take. None if the files are not on this machine, or another
    package's modules hold the weights. Raises as `load_model` for files that are no model."""
    path = Path(source)
    if not path.exists():
        return None
    is_gguf, on_cpu = path.suffix == ".gguf", device.type == "cpu"
    with CheckpointFiles(dtype) as checkpoint:
        config = _config(path, checkpoint)
        scheme = scheme_of(config)
        if quantisation(config) is not None and scheme is None:
            return None
        tensors = list(_gguf_tensors(path, checkpoint) if is_gguf else _safetensors(path, checkpoint, scheme))
    if on_cpu:
        computes_in = torch.float32
        sizes = [_bytes_on_cpu(tensor, dtype) for tensor in tensors]
    else:
        own = next((tensor.dtype for tensor in tensors if tensor.num_dimensions > 1), None)
        # Or float16, which takes as much.
        computes_in = dtype or (torch.bfloat16 if is_gguf or own is None else own)
        in_blocks = (is_gguf or scheme is not None) and dtype is None and has_triton()
        sizes = [_bytes_on_gpu(tensor, computes_in, in_blocks) for tensor in tensors]
    text = config.get_text_config(decoder=True)
    limit = context_limit(config)
    return Footprint(
        sum(sizes),
        max(sizes, default=0),
        kv_token_bytes(text, kv_dtype or computes_in),
        4 * text.vocab_size,
        min(limit, context_length or limit),
    )


def kv_token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token, over all layers, by a text model's configuration."""
    total = 0
    layers = layer_configs(config)
    for layer in layers[: len(layers) - (getattr(config, "num_kv_shared_layers", None) or 0)]:
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        total += 2 * heads * width * dtype.itemsize
    return total


def _config(path: Path, checkpoint: CheckpointFiles) -> Any:
    where = arguments_of(path)
    if "gguf_file" not in where:
        return AutoConfig.from_pretrained(**where)
    from shared.model.weights.gguf import GgufReaders  # most processes read no such file

    with replaced(GgufReaders(checkpoint).replacements):
        return AutoConfig.from_pretrained(**where)


def _gguf_tensors(path: Path, checkpoint: CheckpointFiles) -> Iterator[_Stored]:
    for entry in read_contents(parts_of(path)[0], checkpoint.open).tensors:
        stays = entry.kind.name in BLOCK_KINDS
        dtype = None if stays else PLAIN_KINDS.get(entry.kind, torch.float32)
        size = torch.Size(entry.shape)
        arranged = arranged_bytes(entry.kind.name, size[:-1].numel(), size[-1]) if stays and len(size) > 1 else 0
        yield _Stored(size.numel(), len(size), dtype, entry.num_bytes, arranged)


def _safetensors(path: Path, checkpoint: CheckpointFiles, scheme: Scheme | None) -> Iterator[_Stored]:
    for file in sorted(path.glob("*.safetensors")):
        reader = SafetensorsReader(checkpoint, file, lazy=True, scheme=scheme)
        for entry in reader.entries.values():
            count, stored = torch.Size(entry.shape).numel(), reader.quantised(entry.name)
            if stored is None or not stored.device_kind:
                # A parameter of several matrices is read as float32.
                yield _Stored(count, 2 if entry.is_matrix else 1, entry.dtype, entry.num_bytes)
                continue
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[stored.format]]
            arranged = arranged_bytes(stored.device_kind, count // stored.columns, stored.columns)
            yield _Stored(count, 2, None, count // block * block_bytes, arranged)


def _bytes_on_gpu(tensor: _Stored, computes_in: torch.dtype, in_blocks: bool) -> int:
    return (in_blocks and tensor.arranged_bytes) or tensor.num_elements * computes_in.itemsize


def _bytes_on_cpu(tensor: _Stored, dtype: torch.dtype | None) -> int:
    if tensor.num_dimensions > 1:
        if dtype is not None:
            return tensor.num_elements * dtype.itemsize
        if tensor.dtype is None or tensor.dtype in LAZY_DTYPES:
            return tensor.num_bytes
    return 4 * tensor.num_elements
