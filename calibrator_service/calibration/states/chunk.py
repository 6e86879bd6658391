"""Chunks of states: what exit heads and confidence heads learn from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from shared.errors import Corrupt


@dataclass(frozen=True)
class StateChunk:
    """N positions to learn from. Their states are among R >= N rows, grouped by sequence.

    states: depth -> [R, D] float16, scaled to a root mean square of 1; deep: [R, D] likewise, at depth L; rows: [N]
    index of a position's own row, which follows the row of the position before; choices: [N] int64, the full model's
    choice after the position; converged: depth -> [N] bool, for the cosine label, else empty; usable: [M] bool, which
    of the positions of the sequences' labels are the N ones: nothing is settled before the others.
    """

    states: dict[int, Tensor]
    deep: Tensor
    rows: Tensor
    choices: Tensor
    converged: dict[int, Tensor]
    usable: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> "StateChunk":
        """A copy whose tensors are on `device`, so that batches are gathered there."""
        return StateChunk(
            {depth: state.to(device) for depth, state in self.states.items()},
            self.deep.to(device),
            self.rows.to(device),
            self.choices.to(device),
            {depth: reached.to(device) for depth, reached in self.converged.items()},
            self.usable,
        )


class StateChunks(Sequence[StateChunk]):
    """The chunks of one split. Each access reads a chunk anew, so that one at a time is in memory.
    An access raises `Corrupt`."""

    def __init__(self, paths: Sequence[Path] = (), read: Callable[[Path], StateChunk] | None = None) -> None:
        """`read` makes a chunk from one of the files; by default it is `read_chunk`."""
        self.paths = tuple(paths)
        self._read = read or read_chunk

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> StateChunk: ...
    @overload
    def __getitem__(self, index: slice) -> "StateChunks": ...
    def __getitem__(self, index: int | slice) -> "StateChunk | StateChunks":
        if isinstance(index, slice):
            return StateChunks(self.paths[index], self._read)
        return self._read(self.paths[index])


def read_chunk(path: Path) -> StateChunk:
    """Raises `Corrupt` if the file is no chunk of states."""
    return chunk_from_tensors(read_tensors(path))


def chunk_from_tensors(tensors: Mapping[str, Tensor]) -> StateChunk:
    """The chunk of the tensors that `Collector` captured and, on a CPU, stored under these names."""
    usable = tensors["usable"]
    return StateChunk(
        states={int(n[6:]): t for n, t in tensors.items() if n.startswith("state.")},
        deep=tensors["deep"],
        rows=tensors["rows"][usable],
        choices=tensors["choices"].long()[usable],
        converged={int(n[10:]): t[usable] for n, t in tensors.items() if n.startswith("converged.")},
        usable=usable,
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Raises `Corrupt` if the file is no safetensors file."""
    try:
        return load(path.read_bytes())
    except (SafetensorError, OSError) as error:
        raise Corrupt(f"{path.name} is not a chunk of states") from error
