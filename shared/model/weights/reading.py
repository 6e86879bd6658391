"""Lets transformers build a model whose matrices stay in their files until they are packed.

Transformers decides which tensor of a checkpoint becomes which parameter. For this it gets `LazyWeight`s in place of
matrices. Their numbers are read when they are packed, one matrix at a time, so that no second copy of the model is ever
in memory.
"""

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedConfig, modeling_utils

from shared.errors import Corrupt
from shared.model.remembered.packed import PackedMatrices
from shared.model.weights import groups, mxfp4
from shared.model.weights.files import StableFile, corrupt
from shared.model.weights.lazy import LazyWeight
from shared.model.weights.schemes import Place, Scheme
from shared.model.weights.stored import LAZY_DTYPES, Plain, Stored

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

    @property
    def is_matrix(self) -> bool:
        """Whether it is one matrix. Biases of experts have a row for each."""
        return len(self.shape) == 2 and not self.name.endswith("_bias")


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


def scheme_of(config: PreTrainedConfig) -> Scheme | None:
    """None if neap does not read the checkpoint's quantised matrices, which then are a matter of the package that made
    them."""
    return groups.scheme_of(config) or mxfp4.scheme_of(config)


Replacement = tuple[Any, str, Any]  # a module, the name of one of its functions, and what takes its place

# The attributes of modules that are replaced are those of the whole process.
_lock = threading.RLock()


class CheckpointFiles:
    """The files of one model. `dtype`: the one that matrices are rounded to; None: the checkpoint's own.

    As a context manager it closes the files at the end, unless they are to `stay_open`. If one of them has changed, it
    raises `Unavailable` (reason MODEL_FILE_CHANGED), also in place of an error that the changed file may have caused.

    `matrices` has the matrices that are packed already, and those that are packed from these files.

    `dequantised` maps the name of a tensor to the reason why it could not stay in its own format.
    """

    def __init__(self, dtype: torch.dtype | None, matrices: PackedMatrices | None = None) -> None:
        self.dtype = dtype
        self.matrices = matrices or PackedMatrices()
        self.dequantised: dict[str, str] = {}
        self._files: dict[Path, StableFile] = {}
        self._entries: dict[Path, dict[str, TensorEntry]] = {}
        self._stays_open = False

    def stay_open(self) -> None:
        """The next end leaves the files open, for a context that follows. Without one the collector closes them."""
        self._stays_open = True

    def open(self, path: str | Path) -> StableFile:
        """The file at `path`, opened once. Raises `OSError`."""
        path = Path(path)
        if path not in self._files:
            self._files[path] = StableFile(path)
        return self._files[path]

    def entries(self, path: Path) -> dict[str, TensorEntry]:
        """`read_entries` of a .safetensors file, read once: each of a folder's files asks for those of all."""
        if path not in self._entries:
            self._entries[path] = read_entries(self.open(path))
        return self._entries[path]

    def __enter__(self) -> "CheckpointFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, Exception):
                for file in self._files.values():
                    file.check_unchanged()
        finally:
            stays_open, self._stays_open = self._stays_open and kind is None, False
            for file in () if stays_open else self._files.values():
                file.close()


@contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Within it, functions of transformers are replaced for the thread that entered; for other threads they stay what
    they were.

    One thread at a time can be inside; others wait.
    """
    entered = threading.local()
    with _lock, ExitStack() as stack:
        for module, name, replacement in replacements:
            original = getattr(module, name)
            stack.callback(setattr, module, name, original)
            setattr(module, name, _replaced_where(entered, original, replacement))
        entered.is_inside = True
        try:
            yield
        finally:
            entered.is_inside = False


def _replaced_where(entered: threading.local, original: Any, replacement: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = replacement if getattr(entered, "is_inside", False) else original
        return chosen(*args, **kwargs)

    return call


def safetensors_replacements(
    checkpoint: CheckpointFiles, *, lazy: bool, scheme: Scheme | None = None
) -> list[Replacement]:
    """Make transformers open .safetensors files with `SafetensorsReader`. `lazy`: whether matrices stay in their files.
    `scheme`: how some of them are quantised."""
    reader = partial(SafetensorsReader, checkpoint, lazy=lazy, scheme=scheme)
    return [(modeling_utils, "safe_open", lambda path, *_, **__: reader(path))]


class SafetensorsReader:
    """What transformers uses of `safetensors.safe_open`, which maps the file and gives tensors that are parts of the
    mapping. Tensors of a quantised parameter, which may be in other files of the folder, are one."""

    def __init__(
        self, checkpoint: CheckpointFiles, path: str | Path, *, lazy: bool, scheme: Scheme | None = None
    ) -> None:
        self._checkpoint, self._lazy = checkpoint, lazy
        self._file = checkpoint.open(path)
        self.entries = dict(checkpoint.entries(Path(path)))
        self._scheme, self._places = scheme, dict[str, dict[str, Place]]()
        if scheme is not None:
            self._gather(Path(path), scheme)

    def _gather(self, path: Path, scheme: Scheme) -> None:
        """Puts quantised parameters in the place of their tensors."""
        places: dict[str, Place] = {}
        for each in [path, *sorted(path.parent.glob("*.safetensors"))]:
            for name, entry in self._checkpoint.entries(each).items():
                if name.endswith(scheme.parts):
                    places.setdefault(name, Place(self._checkpoint.open(each), entry.offset, entry.shape, entry.dtype))
        for name in [name for name in self.entries if name.endswith(scheme.parts)]:
            entry = self.entries.pop(name)
            if name.endswith(scheme.parts[0]):
                prefix = name.removesuffix(scheme.parts[0])
                own = {part[1:]: places[prefix + part] for part in scheme.parts if prefix + part in places}
                weight, shape = prefix + scheme.suffix, scheme.shape_of(prefix, own)
                self._places[weight] = own
                self.entries[weight] = TensorEntry(weight, torch.float16, shape, entry.offset, entry.num_bytes)

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(self, *_: object) -> None:
        """The checkpoint closes the file."""

    def keys(self) -> list[str]:
        return list(self.entries)

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self, self.entries[name])

    def quantised(self, name: str) -> Stored | None:
        """The quantised parameter `name`. None if it is none."""
        if self._scheme is None or name not in self._places:
            return None
        checkpoint = self._checkpoint
        return self._scheme.stored(name, self._places[name], checkpoint.dtype, checkpoint.matrices)

    def get_tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        quantised = self.quantised(name)
        if quantised is not None:
            if quantised.why_wide:
                self._checkpoint.dequantised[name] = quantised.why_wide
            return LazyWeight(quantised)
        shape = entry.shape
        if self._lazy and entry.is_matrix and entry.num_bytes and entry.dtype in LAZY_DTYPES:
            rows, columns = shape
            checkpoint, place = self._checkpoint, (self._file, entry.offset, (rows, columns), entry.dtype)
            return LazyWeight(Plain(*place, target_dtype=checkpoint.dtype, matrices=checkpoint.matrices))
        data = self._file.read(entry.offset, entry.num_bytes)
        return data.view(entry.dtype).view(shape)


class _Slice:
    """A tensor of the file that is read when it is indexed."""

    def __init__(self, reader: SafetensorsReader, entry: TensorEntry) -> None:
        self._reader, self._entry = reader, entry

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """The name that the file uses, such as "BF16"."""
        return NAMES[self._entry.dtype]

    def __getitem__(self, index: Any) -> Tensor:
        tensor = self._reader.get_tensor(self._entry.name)
        return tensor if index is ... else tensor[index]
