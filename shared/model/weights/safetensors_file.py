"""The table of contents of a .safetensors file, checked: https://huggingface.co/docs/safetensors."""

import json
import math
from dataclasses import dataclass
from typing import TypeGuard

import torch

from shared.errors import Corrupt
from shared.model.weights.files import StableFile, corrupt

MAX_HEADER_BYTES = 100_000_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file: `num_bytes` bytes from `offset` on, counted from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_entries(file: StableFile) -> dict[str, TensorEntry]:
    """The tensors of the file by name. Raises `Corrupt` if it is cut or its table contradicts itself."""
    length = int.from_bytes(file.read(0, 8).numpy().tobytes(), "little")
    if length > min(MAX_HEADER_BYTES, file.size - 8):
        raise corrupt(file.path, f"its header claims {length} bytes")
    try:
        header = json.loads(file.read(8, length).numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise corrupt(file.path, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise corrupt(file.path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, fields, 8 + length) for name, fields in header.items()}
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != end:
            raise corrupt(file.path, f"tensor {entry.name!r} does not follow the one before it")
        end += entry.num_bytes
    if end != file.size:
        raise corrupt(file.path, f"its tensors end at byte {end}, but it has {file.size} bytes")
    return entries


def _entry(file: StableFile, name: str, fields: object, data_start: int) -> TensorEntry:
    if not isinstance(fields, dict):
        raise _bad_entry(file, name)
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _bad_entry(file, name)
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _bad_entry(file, name)
    begin, end = offsets
    num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != num_bytes:
        raise _bad_entry(file, name)
    return TensorEntry(name, DTYPES[dtype], tuple(shape), data_start + begin, num_bytes)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 62 for number in value)


def _bad_entry(file: StableFile, name: str) -> Corrupt:
    return corrupt(file.path, f"the entry of tensor {name!r} is invalid")
