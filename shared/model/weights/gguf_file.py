"""The metadata and the table of contents of a .gguf file, checked.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file may claim anything, so every count and
offset is compared with the size of the file before it is used.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from shared.errors import UnsupportedModel
from shared.model.weights.files import StableFile, corrupt, parts_of

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
# Bytes that are read at once. The vocabulary of a model takes several megabytes.
READ_BYTES = 1 << 23
# Metadata whose value no dimension of a tensor may be smaller than. Transformers allocates by them.
SIZES = ("embedding_length", "feed_forward_length", "vocab_size")

_NUM_PARTS = "split.count"

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class Field:
    """One entry of the metadata. `values`: one value, or those of an array.
    `types`: its type, then that of an array's elements."""

    values: list[Any]
    types: list[GGUFValueType]


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: `num_bytes` bytes of `file` from `offset` on, counted from its start.
    `shape` as in PyTorch: rows first."""

    file: StableFile
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufContents:
    """What stands in a file, or in all parts of a split one, whose first has the metadata. `header`: the bytes of the
    file at `path` before the first tensor. `tensors_at`: where in them the table of tensors begins."""

    path: Path
    fields: dict[str, Field]
    tensors: tuple[GgufTensor, ...]
    header: bytes
    tensors_at: int

    @property
    def architecture(self) -> str:
        return str(self.fields["general.architecture"].values[0])


def read_contents(path: Path, opened: Callable[[Path], StableFile]) -> GgufContents:
    """The contents of the file at `path`, and of its other parts. Raises `Corrupt` if a file is cut or contradicts
    itself or another part, and `UnsupportedModel` for another version or byte order."""
    first, *others = (_read_part(opened(part)) for part in parts_of(path))
    # The other parts need not have it.
    if not _is_text(first.fields.get("general.architecture")):
        raise corrupt(path, "its metadata has no general.architecture")
    count = first.fields.get(_NUM_PARTS)
    if (count.values[0] if count else 1) not in (0, 1 + len(others)):
        raise corrupt(path, "it is a part of a split file, and its name does not say which")
    tensors = sum((part.tensors for part in others), first.tensors)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise corrupt(path, "two of its tensors have the same name")
    contents = replace(first, tensors=tensors)
    _check_sizes(contents)
    return contents


def _read_part(file: StableFile) -> GgufContents:
    cursor = _Cursor(file)
    if cursor.take(4) != b"GGUF":
        raise corrupt(file.path, "it is not a GGUF file")
    (version,) = cursor.unpack("I")
    if version not in VERSIONS:
        swapped = " in the other byte order" if version & 0xFFFF == 0 else ""
        raise UnsupportedModel(
            f"{file.path.name} is a GGUF file of version {version}{swapped}; versions {VERSIONS} are supported",
            metadata={"file": str(file.path)},
        )
    num_tensors, num_fields = cursor.unpack("QQ")
    # The shortest entries: an empty key and one byte; an empty name without dimensions.
    cursor.check_count(num_fields, 13, "entries of metadata")
    fields: dict[str, Field] = {}
    for _ in range(num_fields):
        key = cursor.string()
        if key in fields:
            raise corrupt(file.path, f"its metadata has {key!r} twice")
        fields[key] = _field(cursor)
    cursor.check_count(num_tensors, 24, "tensors")
    tensors_at = cursor.position
    table = [_table_entry(cursor) for _ in range(num_tensors)]
    alignment = _alignment(cursor, fields)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = tuple(_checked_entry(cursor, *entry, data_start, alignment) for entry in table)
    return GgufContents(file.path, fields, tensors, cursor.passed(), tensors_at)


class _Cursor:
    """Reads from front to back. Raises `Corrupt` where the file ends too early."""

    def __init__(self, file: StableFile) -> None:
        self.file = file
        self.position = 0
        self._data = bytearray()

    def take(self, count: int) -> bytes:
        self._need(count)
        self.position += count
        return bytes(self._data[self.position - count : self.position])

    def unpack(self, form: str, count: int = 1) -> tuple[Any, ...]:
        """`count` times the numbers of the struct format `form`, little-endian, without padding."""
        layout = "<" + form * count if len(form) > 1 else f"<{count}{form}"
        size = struct.calcsize(layout)
        self._need(size)
        self.position += size
        return struct.unpack_from(layout, self._data, self.position - size)

    def string(self) -> str:
        (length,) = self.unpack("Q")
        self.check_count(length, 1, "bytes of text")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise corrupt(self.file.path, f"the text at byte {self.position} is not UTF-8") from error

    def strings(self, count: int) -> list[str]:
        """`count` texts, of which each follows its length. As `string`, but a vocabulary has hundreds of thousands."""
        texts: list[str] = []
        data, position, unpack = self._data, self.position, struct.Struct("<Q").unpack_from
        try:
            while len(texts) < count and position + 8 <= len(data):
                (length,) = unpack(data, position)
                end = position + 8 + length
                if end > len(data):
                    break
                texts.append(data[position + 8 : end].decode())
                position = end
        except UnicodeDecodeError:
            pass  # `string` says where
        self.position = position
        return texts

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Refuses `count` things of at least `least_bytes` each if the rest of the file is shorter."""
        if count * least_bytes > self.file.size - self.position:
            raise corrupt(self.file.path, f"it claims {count} {what} at byte {self.position}")

    def passed(self) -> bytes:
        return bytes(self._data[: self.position])

    def _need(self, count: int) -> None:
        missing = self.position + count - len(self._data)
        if missing > 0:
            left = self.file.size - len(self._data)
            if missing > left:
                raise corrupt(self.file.path, f"it ends before byte {self.position + count}")
            more = self.file.read(len(self._data), min(max(missing, READ_BYTES), left))
            self._data += more.numpy().tobytes()


def _field(cursor: _Cursor) -> Field:
    kind = _value_type(cursor)
    if kind != GGUFValueType.ARRAY:
        return Field(_values(cursor, kind, 1), [kind])
    element = _value_type(cursor)
    (count,) = cursor.unpack("Q")
    return Field(_values(cursor, element, count), [kind, element])


def _value_type(cursor: _Cursor) -> GGUFValueType:
    (number,) = cursor.unpack("I")
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise corrupt(cursor.file.path, f"its metadata has a value of unknown type {number}") from error


def _values(cursor: _Cursor, kind: GGUFValueType, count: int) -> list[Any]:
    if kind in _SCALARS:
        form = _SCALARS[kind]
        cursor.check_count(count, struct.calcsize(form), "numbers")
        return list(cursor.unpack(form, count))
    if kind == GGUFValueType.STRING:
        cursor.check_count(count, 8, "texts")
        texts = cursor.strings(count)
        while len(texts) < count:  # the next one is not read yet, or damaged
            texts.append(cursor.string())
            texts += cursor.strings(count - len(texts))
        return texts
    raise corrupt(cursor.file.path, "its metadata has an array of arrays")


def _table_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    (num_dimensions,) = cursor.unpack("I")
    if num_dimensions > MAX_DIMENSIONS:
        raise corrupt(cursor.file.path, f"tensor {name!r} has {num_dimensions} dimensions")
    dimensions = cursor.unpack("Q", num_dimensions) if num_dimensions else ()
    kind, offset = cursor.unpack("IQ")
    return name, tuple(reversed(dimensions)), kind, offset


def _checked_entry(
    cursor: _Cursor, name: str, shape: tuple[int, ...], number: int, offset: int, data_start: int, alignment: int
) -> GgufTensor:
    path = cursor.file.path
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise UnsupportedModel(
            f"tensor {name!r} of {path.name} has the unknown type {number}",
            metadata={"file": str(path), "tensor": name},
        ) from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if math.prod(shape) == 0:
        raise corrupt(path, f"tensor {name!r} is empty")
    if (shape[-1] if shape else 1) % block:
        raise corrupt(path, f"rows of tensor {name!r} do not divide into blocks of {block}")
    num_bytes = math.prod(shape) // block * block_bytes
    if offset % alignment or data_start + offset + num_bytes > cursor.file.size:
        raise corrupt(path, f"tensor {name!r} lies outside the file")
    return GgufTensor(cursor.file, name, kind, shape, data_start + offset, num_bytes)


def _alignment(cursor: _Cursor, fields: dict[str, Field]) -> int:
    field = fields.get("general.alignment")
    if field is None:
        return DEFAULT_ALIGNMENT
    value = field.values[0] if field.values else 0
    if field.types != [GGUFValueType.UINT32] or value == 0 or value & (value - 1):
        raise corrupt(cursor.file.path, "its alignment is not a power of two")
    return int(value)


def _check_sizes(contents: GgufContents) -> None:
    """Refuses metadata that promises a larger model than the tensors make.
    Transformers would allocate what it promises."""
    widest = max((max(tensor.shape, default=1) for tensor in contents.tensors), default=0)
    limits = dict.fromkeys(SIZES, widest) | {"block_count": len(contents.tensors)}
    for key, field in contents.fields.items():
        limit = limits.get(key.removeprefix(f"{contents.architecture}."))
        if limit is not None and any(isinstance(value, int) and not 0 <= value <= limit for value in field.values):
            raise corrupt(contents.path, f"its metadata has {key} = {field.values[0]}")


def _is_text(field: Field | None) -> bool:
    return field is not None and field.types == [GGUFValueType.STRING]
