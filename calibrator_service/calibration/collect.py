"""From sequences to what is learnt from: the full model's choices, and the states at the rungs' depths.

Sequences gather per split into chunks of bounded size; each chunk is passed through the frozen model once and becomes a file.
A later run reads the file instead. On a GPU, where passing is as fast as reading, a chunk is a file of tokens only, and its states are
made anew whenever they are wanted: the disk does not bound how much is learnt from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from calibrator_service.calibration.labels import cosine_converged, greedy_choices
from calibrator_service.calibration.shards import (
    TokenSequence,
    read_shard,
    write_atomically,
    write_shard,
)
from calibrator_service.calibration.splits import Split
from calibrator_service.calibration.state_chunk import (
    StateChunk,
    chunk_of,
    read_chunk,
    read_tensors,
)
from shared.ladder.heads import NUM_OFFSETS, unit
from shared.ladder.successors import Array
from shared.model.runner import Runner

# Tokens of one forward pass, padding included, and positions of one chunk.
PASS_TOKENS = 2048
CHUNK_POSITIONS = 8192


@dataclass(frozen=True)
class LabelledSequence:
    """`choices[i]` is the full model's greedy choice after tokens[: i + 1]; valid from position `first` on. Both [S] int64."""

    tokens: Array
    choices: Array
    first: int


class Collector:
    """Labels sequences, and captures states if there are depths to capture at.

    `keeps_states`: chunks are files of states, `max_state_bytes` per split; otherwise files of tokens, as many as come.
    `pass_tokens`: of one pass, padding included.
    """

    def __init__(
        self,
        runner: Runner,
        depths: Sequence[int],
        folder: Path,
        *,
        max_state_bytes: int,
        cosine_threshold: float | None = None,
        chunk_positions: int = CHUNK_POSITIONS,
        pass_tokens: int = PASS_TOKENS,
        keeps_states: bool = True,
    ) -> None:
        self._runner = runner
        self._depths = tuple(depths)
        self._folder = folder
        self._cosine_threshold = cosine_threshold
        self._chunk_positions = chunk_positions
        self._pass_tokens, self._keeps_states = pass_tokens, keeps_states
        self._buffers: dict[Split, list[TokenSequence]] = {}
        self._num_buffered: dict[Split, int] = {}
        self._files: dict[Split, list[Path]] = {}
        self._num_chunks: dict[Split, int] = {}
        row_bytes = 2 * runner.loaded.hidden_size * (len(self._depths) + 1)
        self._max_positions = max_state_bytes // row_bytes if self._depths else 0
        self._num_positions: dict[Split, int] = {}

    def add(self, split: Split, sequence: TokenSequence) -> list[LabelledSequence]:
        """Takes a sequence in; returns those that became labelled, which may be none yet or many."""
        buffer = self._buffers.setdefault(split, [])
        buffer.append(sequence)
        buffered = self._num_buffered[split] = self._num_buffered.get(split, 0) + _num_positions(sequence)  # fmt: skip
        if buffered < self._chunk_positions:
            return []
        return self._flush(split)

    def finish(self, split: Split) -> list[LabelledSequence]:
        """The rest of a split."""
        return self._flush(split) if self._buffers.get(split) else []

    def chunks(self, split: Split) -> list[Path]:
        """The split's files, for `read`."""
        return list(self._files.get(split, []))

    def read(self, path: Path) -> StateChunk:
        """The states of a chunk, from its file or made anew. Raises `Corrupt`."""
        if self._keeps_states:
            return read_chunk(path)
        return chunk_of(self._capture(read_shard(path), True))

    def _flush(self, split: Split) -> list[LabelledSequence]:
        sequences = self._buffers.pop(split)
        self._num_buffered[split] = 0
        index = self._num_chunks.get(split, 0)
        self._num_chunks[split] = index + 1
        # Disk is bounded, too: what comes beyond feeds the tables only.
        used = self._num_positions.get(split, 0)
        wants_states = bool(self._depths) and used < self._max_positions
        needs_choices = any(s.answer_start == len(s.tokens) for s in sequences)
        if not self._keeps_states and self._depths:
            path = self._folder / f"tokens-{split}-{index:05d}.safetensors"
            if not path.exists():
                write_shard(path, sequences)
            self._files.setdefault(split, []).append(path)
            wants_states = False
        if not wants_states and not needs_choices:
            return [_labelled(s, None) for s in sequences]
        path = self._folder / f"states-{split}-{index:05d}.safetensors"
        tensors = read_tensors(path) if path.exists() else self._capture(sequences, wants_states)
        if not path.exists():
            write_atomically(path, save({name: t.cpu() for name, t in tensors.items()}))
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
        for batch in batches(order, [len(s.tokens) for s in sequences], self._pass_tokens):
            self._pass(batch, sequences, parts, wants_states)
        if wants_states:
            offset = 0
            for part in parts:
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
        """One pass over some rows, padded at the right, where a causal model does not look. States stay on the model's device."""
        runner = self._runner
        width = max(len(sequences[i].tokens) for i in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.long)
        for row, i in enumerate(batch):
            tokens[row, : len(sequences[i].tokens)] = torch.tensor(sequences[i].tokens)
        captured = runner.capture(
            tokens.to(runner.loaded.device), [*self._depths, runner.num_layers]
        )
        spans = [_span(sequences[i]) for i in batch]
        for row, (i, (start, end)) in enumerate(zip(batch, spans, strict=True)):
            sequence, part = sequences[i], parts[i]
            first = first_position(sequence)
            deep = captured[runner.num_layers][row, start:end]
            if first == 0:
                part["choices"] = greedy_choices(runner, deep).to(torch.int32).cpu()
            else:
                part["choices"] = torch.tensor(sequence.tokens[first + 1 :], dtype=torch.int32)
            part["counts"] = torch.tensor([len(part["choices"])], dtype=torch.int32)
            if not wants_states:
                continue
            own = torch.arange(first - start, end - start)
            part["rows"], part["room"] = own, own.clamp(max=NUM_OFFSETS)
            if self._cosine_threshold is not None:
                for depth in self._depths:
                    state = captured[depth][row, start:end]
                    converged = cosine_converged(runner, state, deep, self._cosine_threshold)
                    part[f"converged.{depth}"] = converged.cpu()[own]
        if wants_states:
            # All rows of the pass at once: sequence by sequence a GPU would mostly wait.
            places = [
                torch.arange(start, end) + row * width for row, (start, end) in enumerate(spans)
            ]
            place = torch.cat(places).to(runner.loaded.device)
            names = {"deep": runner.num_layers} | {
                f"state.{depth}": depth for depth in self._depths
            }
            for name, depth in names.items():
                kept = unit(captured[depth].flatten(0, 1)[place]).half()
                for i, piece in zip(batch, kept.split([len(p) for p in places]), strict=True):
                    parts[i][name] = piece


def first_position(sequence: TokenSequence) -> int:
    """The first position whose following token is the full model's choice; 0 for given text, where choices are computed."""
    return sequence.answer_start - 1 if sequence.answer_start < len(sequence.tokens) else 0


def _span(sequence: TokenSequence) -> tuple[int, int]:
    """The positions whose states are kept: those learnt from, and before them what their deep states may come from."""
    first = first_position(sequence)
    # The last token's choice is known only where there is no answer: its logits are there anyway.
    return max(0, first - NUM_OFFSETS), len(sequence.tokens) - (0 if first == 0 else 1)


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


def batches(
    order: list[int], lengths: list[int], pass_tokens: int = PASS_TOKENS
) -> Iterator[list[int]]:
    """`order` in batches, each of at most `pass_tokens` tokens once it is as wide as its last; `lengths` rise in that order."""
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[i] > pass_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
