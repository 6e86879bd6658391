"""Shards: token sequences on disk, written whole or not at all."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from shared.errors import Corrupt
from shared.storage import storage_error


@dataclass(frozen=True)
class TokenSequence:
    """`tokens` of one conversation or text; from `answer_start` on each is the full model's greedy choice.

    For given text `answer_start` is the length: nothing of it was chosen by the model.
    """

    tokens: tuple[int, ...]
    answer_start: int

    @property
    def num_answer_tokens(self) -> int:
        return len(self.tokens) - self.answer_start


def write_shard(path: Path, sequences: Sequence[TokenSequence]) -> None:
    """Writes `sequences` atomically: a killed process leaves no half shard under the final name. Raises as `write_atomically`."""
    tensors = {
        "tokens": torch.tensor([t for s in sequences for t in s.tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(s.tokens) for s in sequences], dtype=torch.int32),
        "answer_starts": torch.tensor([s.answer_start for s in sequences], dtype=torch.int32),
    }
    write_atomically(path, save(tensors))


def read_shard(path: Path) -> list[TokenSequence]:
    """Raises `Corrupt` if the file is not what `write_shard` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            flat, lengths, starts = (
                file.get_tensor(name).tolist() for name in ("tokens", "lengths", "answer_starts")
            )
    except (SafetensorError, OSError) as error:
        raise Corrupt(f"{path.name} is not a shard of token sequences") from error
    if sum(lengths) != len(flat) or len(starts) != len(lengths):
        raise Corrupt(f"{path.name} holds {len(flat)} tokens for {sum(lengths)} announced")
    sequences, offset = [], 0
    for length, start in zip(lengths, starts, strict=True):
        sequences.append(TokenSequence(tuple(flat[offset : offset + length]), start))
        offset += length
    return sequences


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `data` under a temporary name, flushes it to disk and renames it. What was there before stays until then.

    Raises `Exhausted` (DISK_FULL) and `Unavailable` (STORAGE_UNAVAILABLE).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, path.name, place="the calibration's folder") from error
