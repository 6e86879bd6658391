"""The full model's choices along sequences, and the states at the depths that exits learn from.

The states come from the engine that wrote an answer, or else from a pass over the sequence. Sequences are buffered per
split into chunks of bounded size. The chunks of the split `heads` are added to the sums that heads are solved from.
Those of splits that are read again become files, which a later run reads instead of running the model. On a GPU a pass
is as fast as reading its states from disk. There a file holds tokens only and the states are computed again at each
use, so that the disk does not bound the amount of text.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.plan import CHUNK_POSITIONS, PASS_TOKENS
from calibrator_service.calibration.spec import Label
from calibrator_service.calibration.states.chunk import (
    StateChunk,
    StateChunks,
    chunk_from_tensors,
    read_chunk,
    read_tensors,
)
from calibrator_service.calibration.states.moments import Sums
from calibrator_service.calibration.text.shards import TokenSequence, read_shard, write_shard
from calibrator_service.calibration.text.splits import SPLITS, Split
from shared.ladder.exit_head import unit
from shared.ladder.ngram_table import Array
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.runner import captured_depths


@dataclass(frozen=True)
class LabelledSequence:
    """`choices[i]` is the full model's greedy choice after tokens[: i + 1]; valid from position `first` on.
    Both [S] int64."""

    tokens: Array
    choices: Array
    first: int

    @property
    def num_labelled(self) -> int:
        return len(self.tokens) - self.first


@dataclass
class _SplitBuffer:
    """What one split has: sequences that wait for a chunk, their positions, and the chunks so far."""

    waiting: list[TokenSequence] = field(default_factory=list)
    num_waiting_positions: int = 0
    num_chunks: int = 0
    num_stored_positions: int = 0
    files: list[Path] = field(default_factory=list)


class Collector:
    """Labels sequences, and captures states if there are depths to capture at.

    `sums`: what the chunks of the split `heads` are added to. `stored`: the splits whose chunks are read again. With
    `keeps_states`, these are files of states, of at most `max_state_bytes` per split; otherwise files of tokens without
    a limit. `pass_tokens`: tokens of one forward pass, padding included.
    """

    def __init__(
        self,
        runner: ContiguousRunner,
        depths: Sequence[int],
        folder: Path,
        *,
        max_state_bytes: int,
        sums: Sums | None = None,
        stored: Collection[Split] = SPLITS,
        cosine_threshold: float | None = None,
        chunk_positions: int = CHUNK_POSITIONS,
        pass_tokens: int = PASS_TOKENS,
        keeps_states: bool = True,
    ) -> None:
        self._runner = runner
        self._depths = tuple(depths)
        self._folder = folder
        self._sums, self._stored = sums, frozenset(stored)
        self._cosine_threshold = cosine_threshold
        self._chunk_positions = chunk_positions
        self._pass_tokens, self._keeps_states = pass_tokens, keeps_states
        self._splits: dict[Split, _SplitBuffer] = {}
        row_bytes = 2 * runner.loaded.hidden_size * (len(self._depths) + 1)
        self._max_positions = max_state_bytes // row_bytes if self._depths else 0

    def add(self, split: Split, sequence: TokenSequence) -> list[LabelledSequence]:
        """Buffers a sequence. Returns the sequences that were labelled by this call: none, or those of a whole
        chunk."""
        buffer = self._splits.setdefault(split, _SplitBuffer())
        if split == "report" and not sequence.is_greedy:
            # A copy of the model may teach, but figures are those of the model itself.
            sequence = replace(sequence, states=None)
        buffer.waiting.append(sequence)
        buffer.num_waiting_positions += len(sequence.tokens) - first_position(sequence)
        return self._flush(split, buffer) if buffer.num_waiting_positions >= self._chunk_positions else []

    def finish(self, split: Split) -> list[LabelledSequence]:
        """Labels the rest of a split."""
        buffer = self._splits.get(split)
        return self._flush(split, buffer) if buffer is not None and buffer.waiting else []

    def chunks(self, split: Split) -> StateChunks:
        """The split's chunks so far."""
        buffer = self._splits.get(split)
        read = read_chunk if self._keeps_states else self._recompute
        return StateChunks(buffer.files if buffer is not None else (), read)

    def _recompute(self, path: Path) -> StateChunk:
        return chunk_from_tensors(self._capture(read_shard(path), wants_states=True))

    def _flush(self, split: Split, buffer: _SplitBuffer) -> list[LabelledSequence]:
        sequences, index = buffer.waiting, buffer.num_chunks
        buffer.waiting, buffer.num_waiting_positions, buffer.num_chunks = [], 0, index + 1
        is_summed = self._sums is not None and split == "heads" and index >= self._sums.num_chunks
        is_stored = bool(self._depths) and split in self._stored
        if self._keeps_states:
            # The disk is bounded, too. Sequences beyond the bound are not read again.
            is_stored &= buffer.num_stored_positions < self._max_positions
        needs_choices = any(_needs_choices(sequence) and sequence.states is None for sequence in sequences)
        if is_stored and not self._keeps_states:
            path = self._folder / f"tokens-{split}-{index:05d}.safetensors"
            if not path.exists():
                write_shard(path, sequences)
            buffer.files.append(path)
            is_stored = False
        if not is_stored and not is_summed and not needs_choices:
            return [_labelled(s, None) for s in sequences]
        kind = "states" if is_stored else "choices"
        path = self._folder / f"{kind}-{split}-{index:05d}.safetensors"
        tensors = read_tensors(path) if path.exists() else None
        if tensors is None or ("deep" not in tensors and (is_stored or is_summed)):
            tensors = self._capture(sequences, is_stored or is_summed)
            written = tensors if is_stored else {n: tensors[n] for n in ("choices", "counts")}
            write_atomically(path, save({name: t.cpu() for name, t in written.items()}))
        if is_summed:
            assert self._sums is not None
            self._sums.add(chunk_from_tensors(tensors))
        if is_stored:
            buffer.num_stored_positions += len(tensors["rows"])
            buffer.files.append(path)
        choices = tensors["choices"].long().split(tensors["counts"].tolist())
        return [_labelled(s, part.numpy()) for s, part in zip(sequences, choices, strict=True)]

    def _capture(self, sequences: list[TokenSequence], wants_states: bool) -> dict[str, Tensor]:
        """The tensors of a chunk (see `chunk_from_tensors`); only choices and their counts without `wants_states`."""
        parts: list[dict[str, Tensor]] = [{} for _ in sequences]
        unseen = []
        for index, sequence in enumerate(sequences):
            if wants_states and self._was_observed(sequence):
                parts[index] = self._observed(sequence)
            else:
                unseen.append(index)
        order = sorted(unseen, key=lambda i: len(sequences[i].tokens))
        for batch in batches(order, [len(s.tokens) for s in sequences], self._pass_tokens):
            self._forward(batch, sequences, parts, wants_states)
        if wants_states:
            offset = 0
            for part in parts:
                part["rows"] = part["rows"] + offset
                offset += len(part["deep"])
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _was_observed(self, sequence: TokenSequence) -> bool:
        """Whether the engine that wrote the sequence has shown all states that are wanted."""
        depths = {0, *captured_depths(self._runner.num_layers)}
        return (
            sequence.states is not None
            and first_position(sequence) > 0
            and self._cosine_threshold is None
            and depths.issuperset(self._depths)
        )

    def _observed(self, sequence: TokenSequence) -> dict[str, Tensor]:
        """The part of a sequence whose states its engine has shown: as `_forward` fills it."""
        assert sequence.states is not None
        first, end = first_position(sequence), len(sequence.tokens) - 1
        start = max(first - 1, sequence.states_start)
        states = sequence.states[start - sequence.states_start : end - sequence.states_start]
        tokens = torch.tensor(sequence.tokens[start:end]).to(self._runner.loaded.device)
        low, middle = captured_depths(self._runner.num_layers)
        by_depth = {0: unit(self._runner.embed(tokens[None], start)[0]).half()}
        by_depth |= {low: states[:, 0], middle: states[:, 1]}
        positions = torch.arange(first, end)
        choices = torch.tensor(sequence.tokens[first + 1 :], dtype=torch.int32)
        return {
            "choices": choices,
            "counts": torch.tensor([len(choices)], dtype=torch.int32),
            "rows": (positions - start).clamp_min(0),
            # No position is settled before the first that was shown.
            "usable": positions > start,
            "deep": states[:, 2],
            **{f"state.{depth}": by_depth[depth] for depth in self._depths},
        }

    @torch.inference_mode()
    def _forward(
        self, batch: list[int], sequences: list[TokenSequence], parts: list[dict[str, Tensor]], wants_states: bool
    ) -> None:
        """One pass over the sequences of `batch`; fills their `parts`. States stay on the model's device.

        Rows are padded on the right, where causal attention does not look.
        """
        runner = self._runner
        tokens = padded(sequences[i] for i in batch).to(runner.loaded.device)
        captured = runner.capture(tokens, [*self._depths, runner.num_layers])
        spans = [_captured_span(sequences[i]) for i in batch]
        for row, (i, (start, end)) in enumerate(zip(batch, spans, strict=True)):
            sequence, part = sequences[i], parts[i]
            first = first_position(sequence)
            deep = captured[runner.num_layers][row, start:end]
            if _needs_choices(sequence):
                part["choices"] = greedy_choices(runner, deep[first - start :]).to(torch.int32).cpu()
            else:
                part["choices"] = torch.tensor(sequence.tokens[first + 1 :], dtype=torch.int32)
            part["counts"] = torch.tensor([len(part["choices"])], dtype=torch.int32)
            if not wants_states:
                continue
            rows = torch.arange(first - start, end - start)
            # No position is settled before the first token of a sequence.
            part["rows"], part["usable"] = rows, rows > 0
            if self._cosine_threshold is not None:
                for depth in self._depths:
                    state = captured[depth][row, start:end]
                    converged = cosine_converged(runner, state, deep, self._cosine_threshold)
                    part[f"converged.{depth}"] = converged.cpu()[rows]
        if wants_states:
            # All rows of the pass at once: one sequence at a time, a GPU would mostly wait for launches.
            width = tokens.shape[1]
            places = [torch.arange(start, end) + row * width for row, (start, end) in enumerate(spans)]
            place = torch.cat(places).to(runner.loaded.device)
            names = {"deep": runner.num_layers} | {f"state.{depth}": depth for depth in self._depths}
            for name, depth in names.items():
                states = unit(captured[depth].flatten(0, 1)[place]).half()
                for i, piece in zip(batch, states.split([len(p) for p in places]), strict=True):
                    parts[i][name] = piece


def first_position(sequence: TokenSequence) -> int:
    """The first position after which the next token is the full model's choice; 0 for given text, whose choices are
    computed."""
    return sequence.answer_start - 1 if sequence.num_answer_tokens else 0


def _needs_choices(sequence: TokenSequence) -> bool:
    """Whether the full model's choices are to be computed, because they are not the sequence's own tokens."""
    return first_position(sequence) == 0 or not sequence.is_greedy


def _captured_span(sequence: TokenSequence) -> tuple[int, int]:
    """[start, end) of the positions whose states are kept: those learned from, and the one before them, which is
    settled when the first is drafted."""
    first = first_position(sequence)
    # The choice after a greedy answer's last token is unknown. Where choices are computed, there is one.
    return max(0, first - 1), len(sequence.tokens) - (not _needs_choices(sequence))


def _labelled(sequence: TokenSequence, choices: Array | None) -> LabelledSequence:
    """`choices` [S - first] from position `first` on; None: the answer's own tokens.
    An answer's last token has no choice."""
    tokens = np.array(sequence.tokens, dtype=np.int64)
    first = first_position(sequence)
    if choices is None:
        choices = tokens[first + 1 :]
    size = first + len(choices)
    whole = np.zeros(size, dtype=np.int64)
    whole[first:] = choices
    return LabelledSequence(tokens[:size], whole, first)


def padded(sequences: Iterable[TokenSequence]) -> Tensor:
    """Token ids [B, S] int64 of several sequences, padded with zeros on the right."""
    rows = [torch.tensor(sequence.tokens) for sequence in sequences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def batches(order: list[int], lengths: list[int], pass_tokens: int = PASS_TOKENS) -> Iterator[list[int]]:
    """Splits `order` into batches of at most `pass_tokens` tokens, padding included.
    `lengths` must ascend in that order."""
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[i] > pass_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


# Rows of logits computed at a time.
CHUNK_ROWS = 512


@torch.inference_mode()
def greedy_choices(runner: ContiguousRunner, deep: Tensor) -> Tensor:
    """Deep states [N, D] -> the full model's greedy choices [N] int64."""
    return torch.cat([runner.choices(part) for part in deep.split(CHUNK_ROWS)])


@torch.inference_mode()
def cosine_converged(runner: ContiguousRunner, state: Tensor, deep: Tensor, threshold: float) -> Tensor:
    """The label of TIDE: whether the cosine of the normed state [N, D] and the normed deep state [N, D] exceeds
    `threshold`.

    Returns bool [N]. Both states go through the final norm.
    """
    early, final = runner.normed(state).float(), runner.normed(deep).float()
    return F.cosine_similarity(early, final, dim=-1) > threshold


def agreement(label: Label, predicted: Tensor, choices: Tensor, converged: Tensor) -> Tensor:
    """What a confidence head learns, bool [N]: the exit's token is the full model's; with the cosine label, the state
    has converged."""
    return predicted == choices if label == "agreement" else converged
