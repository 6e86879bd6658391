"""Exit heads learn to say what the full model says next, through the LM head's rows of the draft vocabulary."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrator_service.calibration.state_chunk import StateChunk, read_chunk
from shared.errors import Cancelled
from shared.ladder.heads import NUM_OFFSETS, ExitHead

# How often the deep state is 1, 2, 3 and 4 tokens old while training, as chains of drafts will have it.
OFFSET_WEIGHTS = (0.55, 0.2, 0.15, 0.1)
GRADIENT_NORM = 1.0
# Losses are read from the device, and told, this often: each time the host waits until the device has nothing left to do.
REPORT_INTERVAL_S = 0.5


@dataclass(frozen=True)
class TrainParams:
    epochs: int = 6
    batch_size: int = 512
    learning_rate: float = 2e-3
    weight_decay: float = 0.02
    warm_up_share: float = 0.05
    seconds: float = math.inf
    seed: int = 0


@dataclass(frozen=True)
class Batch:
    """state per depth [B, D], deep [B, D], ago [B] int64, choices [B] int64 (draft vocabulary indices or -1)."""

    states: dict[int, Tensor]
    deep: Tensor
    ago: Tensor
    choices: Tensor


def gather_batch(
    chunk: StateChunk, index: Tensor, ago: Tensor, lookup: Tensor, device: torch.device
) -> Batch:
    """The positions `index` of a chunk, their deep state `ago` + 1 positions back, or as old as the sequence allows.

    chunk and lookup: on `device`; index and ago: anywhere.
    """
    index, ago = index.to(device), ago.to(device)
    ago = torch.minimum(ago, chunk.room[index] - 1)
    rows = chunk.rows[index]
    return Batch(
        states={depth: state[rows].float() for depth, state in chunk.states.items()},
        deep=chunk.deep[rows - 1 - ago].float(),
        ago=ago,
        choices=lookup[chunk.choices[index]],
    )


def draw_ago(size: int, generator: torch.Generator) -> Tensor:
    weights = torch.tensor(OFFSET_WEIGHTS[:NUM_OFFSETS])
    return torch.multinomial(weights, size, replacement=True, generator=generator)


def vocabulary_lookup(vocabulary: Tensor, vocabulary_size: int) -> Tensor:
    """Token -> index in the draft vocabulary, -1 outside it. [V] int64."""
    lookup = torch.full((vocabulary_size,), -1, dtype=torch.long)
    lookup[vocabulary] = torch.arange(len(vocabulary))
    return lookup


def train_heads(
    heads: Mapping[int, ExitHead],
    chunks: Sequence[Path],
    rows: Tensor,
    bias: Tensor | None,
    lookup: Tensor,
    params: TrainParams,
    *,
    read: Callable[[Path], StateChunk] = read_chunk,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[float, dict[str, float]], None] | None = None,
) -> None:
    """Trains all heads together, in place: AdamW, cosine schedule, several epochs over the chunks, one in memory at a time.

    `rows` [Vd, head_width], `bias` [Vd]: the frozen head, float32; on a GPU products are rounded to TF32. `read` makes a chunk of
    one of `chunks`. Ends after `params.seconds`, with the schedule fitted to them. `on_step` hears the share done and a running loss per depth, a few times a
    second. Raises `Cancelled`.
    """
    if not chunks:
        return
    device = rows.device
    on_gpu, lookup = device.type == "cuda", lookup.to(device)
    weights = [p for head in heads.values() for p in head.parameters()]
    optimiser = torch.optim.AdamW(
        weights, lr=params.learning_rate, weight_decay=params.weight_decay, betas=(0.9, 0.98), fused=on_gpu or None,
    )  # fmt: skip
    started = time.monotonic()
    told_s = -math.inf
    losses = {depth: rows.new_zeros(()) for depth in heads}
    for share, batch in _epochs(chunks, lookup, params, device, read):
        if should_stop():
            raise Cancelled("stopped while the exit heads were trained")
        done = max(share, (time.monotonic() - started) / params.seconds)
        if done >= 1.0:
            break
        warm = min(1.0, done / params.warm_up_share + 0.02)
        for group in optimiser.param_groups:
            group["lr"] = params.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * done))
        total = rows.new_zeros(())
        with torch.enable_grad(), _fast_products():
            for depth, head in heads.items():
                adapted = head(batch.states[depth], batch.deep, batch.ago)
                loss = F.cross_entropy(
                    F.linear(adapted, rows, bias), batch.choices, ignore_index=-1
                )
                losses[depth].lerp_(loss.detach(), 0.02)
                total = total + loss
            optimiser.zero_grad()
            total.backward()
        torch.nn.utils.clip_grad_norm_(weights, GRADIENT_NORM)
        optimiser.step()
        if on_step is not None and time.monotonic() - told_s >= REPORT_INTERVAL_S:
            told_s = time.monotonic()
            on_step(done, {f"depth-{d}.loss": float(value) for d, value in losses.items()})


@contextmanager
def _fast_products() -> Iterator[None]:
    """Within, a GPU multiplies float32 matrices in TF32; the CPU goes on as it does."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _epochs(
    chunks: Sequence[Path],
    lookup: Tensor,
    params: TrainParams,
    device: torch.device,
    read: Callable[[Path], StateChunk],
) -> Iterator[tuple[float, Batch]]:
    """(share done, batch) over all epochs. Positions outside the draft vocabulary teach nothing and are left out."""
    for epoch in range(params.epochs):
        generator = torch.Generator().manual_seed((params.seed * 1009 + epoch) % 2**63)
        order = torch.randperm(len(chunks), generator=generator).tolist()
        for place, which in enumerate(order):
            chunk = read(chunks[which]).to(device)
            usable = torch.nonzero(lookup[chunk.choices] >= 0)[:, 0].cpu()
            shuffled = usable[torch.randperm(len(usable), generator=generator)]
            batches = shuffled.split(params.batch_size)
            for number, index in enumerate(batches):
                share = (epoch + (place + number / len(batches)) / len(chunks)) / params.epochs
                ago = draw_ago(len(index), generator)
                yield share, gather_batch(chunk, index, ago, lookup, device)
