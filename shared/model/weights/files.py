"""Reads parts of a file into memory of their own, and notices if the file changes meanwhile.

Files of others are not mapped: if a mapped file is cut, the next access to its pages ends the process with SIGBUS.
"""

import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.errors import Corrupt, Unavailable

# How llama.cpp names the parts of a .gguf file that is split.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# One call of `preadv` reads less than 2 GiB.
LARGEST_READ = 1 << 30


_own = threading.local()
# More is not kept: the matrix of a vocabulary is as large as a tenth of a model.
_MOST_KEPT_BYTES = 1 << 25


def keep_memory() -> None:
    """From now on this thread's `read_briefly` reads into memory that is kept until the thread ends, unless it is much.
    To ask the system for new pages each time takes as long as packing what was read."""
    kept = _new(0)

    def memory(count: int) -> Tensor:
        nonlocal kept
        if count > _MOST_KEPT_BYTES:
            return _new(count)
        if len(kept) < count:
            kept = _new(count)
        return kept[:count]

    _own.memory = memory


def _new(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)


def corrupt(path: str | Path, why: str) -> Corrupt:
    """The error for a file whose contents contradict its format."""
    return Corrupt(
        f"{Path(path).name} cannot be read: {why}", reason="MODEL_FILE_CORRUPT", metadata={"file": str(path)}
    )


def parts_of(path: Path) -> tuple[Path, ...]:
    """The parts of a file that is split, by the name of one of them, and the path itself for others."""
    named = _PART.fullmatch(path.name)
    if named is None or not 1 <= int(named["number"]) <= int(named["count"]):
        return (path,)
    numbers = range(1, int(named["count"]) + 1)
    return tuple(path.with_name(f"{named['stem']}-{number:05d}-of-{named['count']}.gguf") for number in numbers)


class StableFile:
    """An open file that must not change while it is read. `size` is in bytes. Thread-safe."""

    _descriptor = -1

    def __init__(self, path: str | Path) -> None:
        """Raises `OSError` if the file cannot be opened."""
        self.path = Path(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self._descriptor)
        self._state = _state(status)
        self.size = status.st_size

    def read(self, offset: int, count: int) -> Tensor:
        """`count` bytes from `offset` on: uint8 [count]. Raises `Corrupt` if the file has fewer."""
        return self._read(offset, count, _new)

    def read_briefly(self, offset: int, count: int) -> Tensor:
        """As `read`. In a thread that has called `keep_memory` the bytes stay until it reads the next ones so."""
        return self._read(offset, count, getattr(_own, "memory", _new))

    def _read(self, offset: int, count: int, memory: Callable[[int], Tensor]) -> Tensor:
        if offset < 0 or count < 0 or offset + count > self.size:
            raise corrupt(self.path, f"it ends before byte {offset + count}")
        data = memory(count)
        array: Any = data.numpy()
        view, done = memoryview(array), 0
        while done < count:
            part = view[done : done + LARGEST_READ]
            got = os.preadv(self._descriptor, [part], offset + done)
            if got == 0:
                raise self._changed()
            done += got
        return data

    def read_rows(self, offset: int, row_bytes: int, rows: Sequence[int]) -> Tensor:
        """Rows `rows` of a matrix that begins at `offset`: uint8 [number of rows, row_bytes].
        Raises `Corrupt` as `read` does."""
        data = torch.empty(len(rows), row_bytes, dtype=torch.uint8)
        for index, row in enumerate(rows):
            data[index] = self.read(offset + row * row_bytes, row_bytes)
        return data

    def check_unchanged(self) -> None:
        """Raises `Unavailable` (reason MODEL_FILE_CHANGED) if the file has been written to, replaced or removed since
        it was opened.

        This object still reads a file that was replaced.
        But the other files of the model may be those of the new version.
        """
        try:
            state = _state(self.path.stat())
        except OSError as error:
            raise self._changed() from error
        if state != self._state:
            raise self._changed()

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = close

    def _changed(self) -> Unavailable:
        return Unavailable(
            f"{self.path.name} was changed while the model was loading",
            reason="MODEL_FILE_CHANGED",
            metadata={"file": str(self.path)},
        )


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
