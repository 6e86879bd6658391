"""From sequences to what is learnt from: the full model's choices, and the states at the rungs' depths.

Sequences gather per split into chunks of bounded size; each chunk is passed through the frozen model once and becomes a file.
A later run reads the file instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from calibrator_service.calibration.labels import cosine_converged, greedy_choices
from calibrator_service.calibration.shards import TokenSequence, write_atomically
from calibrator_service.calibration.splits import Split
from shared.errors import Corrupt
from shared.ladder.heads import NUM_OFFSETS, unit
from shared.ladder.successors import Array
from shared.model.runner import DepthRunner

# Tokens of one forward pass, padding included, and positions of one chunk.
PASS_TOKENS = 2048
CHUNK_POSITIONS = 8192


@dataclass(frozen=True)
class LabelledSequence:
    """`choices[i]` is the full model's greedy choice after tokens[: i + 1]; valid from position `first` on. Both [S] int64."""

    tokens: Array
    choices: Array
    first: int


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


class Collector:
    """Labels sequences, and captures states if there are depths to capture at."""

    def __init__(
        self,
        runner: DepthRunner,
        depths: Sequence[int],
        folder: Path,
        *,
        max_state_bytes: int,
        cosine_threshold: float | None = None,
        chunk_positions: int = CHUNK_POSITIONS,
    ) -> None:
        self._runner = runner
        self._depths = tuple(depths)
        self._folder = folder
        self._cosine_threshold = cosine_threshold
        self._chunk_positions = chunk_positions
        self._buffers: dict[Split, list[TokenSequence]] = {}
        self._files: dict[Split, list[Path]] = {}
        self._num_chunks: dict[Split, int] = {}
        row_bytes = 2 * runner.loaded.hidden_size * (len(self._depths) + 1)
        self._max_positions = max_state_bytes // row_bytes if self._depths else 0
        self._num_positions: dict[Split, int] = {}

    def add(self, split: Split, sequence: TokenSequence) -> list[LabelledSequence]:
        """Takes a sequence in; returns those that became labelled, which may be none yet or many."""
        buffer = self._buffers.setdefault(split, [])
        buffer.append(sequence)
        if sum(_num_positions(s) for s in buffer) < self._chunk_positions:
            return []
        return self._flush(split)

    def finish(self, split: Split) -> list[LabelledSequence]:
        """The rest of a split."""
        return self._flush(split) if self._buffers.get(split) else []

    def chunks(self, split: Split) -> list[Path]:
        """The split's files of states, for `read_chunk`."""
        return list(self._files.get(split, []))

    def _flush(self, split: Split) -> list[LabelledSequence]:
        sequences = self._buffers.pop(split)
        index = self._num_chunks.get(split, 0)
        self._num_chunks[split] = index + 1
        # Disk is bounded, too: what comes beyond feeds the tables only.
        used = self._num_positions.get(split, 0)
        wants_states = bool(self._depths) and used < self._max_positions
        needs_choices = any(s.answer_start == len(s.tokens) for s in sequences)
        if not wants_states and not needs_choices:
            return [_labelled(s, None) for s in sequences]
        path = self._folder / f"states-{split}-{index:05d}.safetensors"
        tensors = _read(path) if path.exists() else self._capture(sequences, wants_states)
        if not path.exists():
            write_atomically(path, save(tensors))
        if wants_states:
            self._num_positions[split] = used + len(tensors["rows"])
            self._files.setdefault(split, []).append(path)
        ends = torch.cumsum(tensors["counts"], 0).tolist()
        choices = tensors["choices"].long().numpy()
        return [
            _labelled(s, choices[end - count : end])
            for s, end, count in zip(sequences, ends, tensors["counts"].tolist(), strict=True)
        ]

    def _capture(self, sequences: list[TokenSequence], wants_states: bool) -> dict[str, Tensor]:
        parts: list[dict[str, Tensor]] = [{} for _ in sequences]
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i].tokens))
        for batch in batches(order, [len(s.tokens) for s in sequences]):
            self._pass(batch, sequences, parts, wants_states)
        offset = 0
        for part in parts:
            if wants_states:
                part["rows"] = part["rows"] + offset
                offset += len(part["deep"])
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    @torch.inference_mode()
    def _pass(
        self,
        batch: list[int],
        sequences: list[TokenSequence],
        parts: list[dict[str, Tensor]],
        wants_states: bool,
    ) -> None:
        """One pass over some rows, padded at the right, where a causal model does not look."""
        runner = self._runner
        width = max(len(sequences[i].tokens) for i in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.long)
        for row, i in enumerate(batch):
            tokens[row, : len(sequences[i].tokens)] = torch.tensor(sequences[i].tokens)
        captured = runner.capture(
            tokens.to(runner.loaded.device), [*self._depths, runner.num_layers]
        )
        for row, i in enumerate(batch):
            sequence, part = sequences[i], parts[i]
            first = first_position(sequence)
            # The last token's choice is known only where there is no answer: its logits are there anyway.
            end = len(sequence.tokens) - (0 if first == 0 else 1)
            start = max(0, first - NUM_OFFSETS)
            deep = captured[runner.num_layers][row, start:end]
            if first == 0:
                part["choices"] = greedy_choices(runner, deep).to(torch.int32).cpu()
            else:
                part["choices"] = torch.tensor(sequence.tokens[first + 1 :], dtype=torch.int32)
            part["counts"] = torch.tensor([len(part["choices"])], dtype=torch.int32)
            if not wants_states:
                continue
            own = torch.arange(first - start, end - start)
            states = {depth: captured[depth][row, start:end] for depth in self._depths}
            part["deep"] = unit(deep).half().cpu()
            part["rows"], part["room"] = own, own.clamp(max=NUM_OFFSETS)
            for depth, state in states.items():
                part[f"state.{depth}"] = unit(state).half().cpu()
                if self._cosine_threshold is not None:
                    converged = cosine_converged(runner, state, deep, self._cosine_threshold)
                    part[f"converged.{depth}"] = converged.cpu()[own]


def read_chunk(path: Path) -> StateChunk:
    """Raises `Corrupt` if the file is no chunk of states."""
    tensors = _read(path)
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


def first_position(sequence: TokenSequence) -> int:
    """The first position whose following token is the full model's choice; 0 for given text, where choices are computed."""
    return sequence.answer_start - 1 if sequence.answer_start < len(sequence.tokens) else 0


def _num_positions(sequence: TokenSequence) -> int:
    return len(sequence.tokens) - first_position(sequence)


def _labelled(sequence: TokenSequence, choices: Array | None) -> LabelledSequence:
    tokens = np.array(sequence.tokens, dtype=np.int64)
    first = first_position(sequence)
    full = np.zeros_like(tokens)
    if choices is None:
        choices = tokens[first + 1 :]
    full[first : first + len(choices)] = choices
    # Of an answer the last token's successor is unknown: it serves as a token only.
    size = first + len(choices)
    return LabelledSequence(tokens[:size], full[:size], first)


def batches(order: list[int], lengths: list[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[i] > PASS_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load(path.read_bytes())
    except (SafetensorError, OSError) as error:
        raise Corrupt(f"{path.name} is not a chunk of states") from error
