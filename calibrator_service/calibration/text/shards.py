"""Token sequences, and the files (shards) that hold them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from calibrator_service.calibration.files import write_atomically
from shared.errors import Corrupt


@dataclass(frozen=True)
class TokenSequence:
    """The `tokens` of one conversation or text, of which those from `answer_start` on are the model's answer.

    For given text `answer_start` is the length. `is_greedy`: each token of the answer is the full model's greedy
    choice. `kind`: of the prompt; it decides the split and is not stored. Nor are `states` [N, 3, D] float16, which the
    engine that wrote the answer has shown: those of the tokens from `states_start` on at the depths `captured_depths`
    and L, scaled to a root mean square of 1. With them, each token of the answer is the greedy choice of that engine's
    model: the model itself, or a copy of it in bfloat16.
    """

    tokens: tuple[int, ...]
    answer_start: int
    is_greedy: bool = True
    kind: str = ""
    states: Tensor | None = field(default=None, compare=False, repr=False)
    states_start: int = field(default=0, compare=False)

    @property
    def num_answer_tokens(self) -> int:
        return len(self.tokens) - self.answer_start

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.answer_start]


def write_shard(path: Path, sequences: Sequence[TokenSequence]) -> None:
    """Writes `sequences` atomically: a killed process leaves no partial shard under `path`.
    Raises as `write_atomically`."""
    tensors = {
        "tokens": torch.tensor([t for s in sequences for t in s.tokens], dtype=torch.int32),
        "lengths": torch.tensor([len(s.tokens) for s in sequences], dtype=torch.int32),
        "answer_starts": torch.tensor([s.answer_start for s in sequences], dtype=torch.int32),
        "is_greedy": torch.tensor([s.is_greedy for s in sequences], dtype=torch.uint8),
    }
    write_atomically(path, save(tensors))


def read_shard(path: Path) -> list[TokenSequence]:
    """Raises `Corrupt` if `write_shard` did not write the file."""
    try:
        with safe_open(path, framework="pt") as file:
            names = ("tokens", "lengths", "answer_starts", "is_greedy")
            flat, lengths, starts, greedy = (file.get_tensor(name).tolist() for name in names)
    except (SafetensorError, OSError) as error:
        raise Corrupt(f"{path.name} is not a shard of token sequences") from error
    if sum(lengths) != len(flat) or not len(starts) == len(greedy) == len(lengths):
        raise Corrupt(f"{path.name} holds {len(flat)} tokens for {sum(lengths)} announced")
    sequences, offset = [], 0
    for length, start, is_greedy in zip(lengths, starts, greedy, strict=True):
        tokens = tuple(flat[offset : offset + length])
        sequences.append(TokenSequence(tokens, start, bool(is_greedy)))
        offset += length
    return sequences
