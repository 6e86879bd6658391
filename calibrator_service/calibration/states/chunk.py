"""What exit heads and routers learn from: positions of many sequences, with the model's states around them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from shared.errors import Corrupt


@dataclass(frozen=True)
class StateChunk:
    """N positions to learn from, whose states are rows of R >= N.

    states: depth -> [R, D] float16, scaled to unit root mean square; deep: [R, D] likewise, at depth L; rows: [N] where a
    position's own row is; room: [N] rows of the same sequence before it, at least 1; choices: [N] int64;
    converged: depth -> [N] bool (cosine label; empty unless asked for).
    """

    states: dict[int, Tensor]
    deep: Tensor
    rows: Tensor
    room: Tensor
    choices: Tensor
    converged: dict[int, Tensor]

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> "StateChunk":
        """All of it there, so that batches are taken out there."""
        return StateChunk(
            {depth: state.to(device) for depth, state in self.states.items()},
            self.deep.to(device),
            self.rows.to(device),
            self.room.to(device),
            self.choices.to(device),
            {depth: reached.to(device) for depth, reached in self.converged.items()},
        )


def read_chunk(path: Path) -> StateChunk:
    """Raises `Corrupt` if the file is no chunk of states."""
    return chunk_of(read_tensors(path))


def chunk_of(tensors: Mapping[str, Tensor]) -> StateChunk:
    """From what `Collector` captured."""
    usable = tensors["room"] > 0  # a sequence's first token has no settled one before it
    return StateChunk(
        states={int(n[6:]): t for n, t in tensors.items() if n.startswith("state.")},
        deep=tensors["deep"],
        rows=tensors["rows"][usable],
        room=tensors["room"][usable],
        choices=tensors["choices"].long()[usable],
        converged={
            int(n[10:]): t[usable] for n, t in tensors.items() if n.startswith("converged.")
        },
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Raises `Corrupt` if the file is no chunk."""
    try:
        return load(path.read_bytes())
    except (SafetensorError, OSError) as error:
        raise Corrupt(f"{path.name} is not a chunk of states") from error
