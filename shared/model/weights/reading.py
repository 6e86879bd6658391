"""Lets transformers build a model whose matrices stay in their files until they are packed.

Transformers decides which tensor of a checkpoint becomes which parameter. For this it gets `LazyWeight`s in place of
matrices. Their numbers are read when they are packed, one matrix at a time, so that no second copy of the model is ever
in memory.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import modeling_utils

from shared.model.remembered.packed import PackedMatrices
from shared.model.weights.files import StableFile
from shared.model.weights.lazy import LazyWeight
from shared.model.weights.safetensors_file import NAMES, TensorEntry, read_entries
from shared.model.weights.stored import LAZY_DTYPES, Plain

Replacement = tuple[Any, str, Any]  # a module, the name of one of its functions, and what takes its place

# The attributes of modules that are replaced are those of the whole process.
_lock = threading.RLock()


class CheckpointFiles:
    """The files of one model. `dtype`: the one that matrices are rounded to; None: the checkpoint's own.

    As a context manager it closes the files at the end. If one of them has changed, it raises `Unavailable` (reason
    MODEL_FILE_CHANGED), also in place of an error that the changed file may have caused.

    `matrices` has the matrices that are packed already, and those that are packed from these files.

    `dequantised` maps the name of a tensor to the reason why it could not stay in its own format.
    """

    def __init__(self, dtype: torch.dtype | None, matrices: PackedMatrices | None = None) -> None:
        self.dtype = dtype
        self.matrices = matrices or PackedMatrices()
        self.dequantised: dict[str, str] = {}
        self._files: dict[Path, StableFile] = {}

    def open(self, path: str | Path) -> StableFile:
        """The file at `path`, opened once. Raises `OSError`."""
        path = Path(path)
        if path not in self._files:
            self._files[path] = StableFile(path)
        return self._files[path]

    def __enter__(self) -> "CheckpointFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, Exception):
                for file in self._files.values():
                    file.check_unchanged()
        finally:
            for file in self._files.values():
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


def safetensors_replacements(checkpoint: CheckpointFiles, *, lazy: bool) -> list[Replacement]:
    """Make transformers open .safetensors files with `SafetensorsReader`.
    `lazy`: whether matrices stay in their files."""
    return [(modeling_utils, "safe_open", lambda path, *_, **__: SafetensorsReader(checkpoint, path, lazy=lazy))]


class SafetensorsReader:
    """What transformers uses of `safetensors.safe_open`, which maps the file and gives tensors that are parts of the
    mapping."""

    def __init__(self, checkpoint: CheckpointFiles, path: str, *, lazy: bool) -> None:
        self._checkpoint, self._lazy = checkpoint, lazy
        self._file = checkpoint.open(path)
        self._entries = read_entries(self._file)

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(self, *_: object) -> None:
        """The checkpoint closes the file."""

    def keys(self) -> list[str]:
        return list(self._entries)

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self, self._entries[name])

    def get_tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        shape = entry.shape
        if self._lazy and len(shape) == 2 and entry.num_bytes and entry.dtype in LAZY_DTYPES:
            checkpoint, place = self._checkpoint, (self._file, entry.offset, shape, entry.dtype)
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
