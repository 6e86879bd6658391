"""Exit heads learn to predict the full model's next token, through the LM head's rows of the draft vocabulary."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.plan import HEADS_END, RISK_TEXT_ENDS, HeadTraining
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.training_data import TrainingData
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from shared.errors import Cancelled
from shared.ladder.artefact import round_weights
from shared.ladder.head_rows import head_width
from shared.ladder.heads import NUM_OFFSETS, ExitHead

# How often the deep state is 1, 2, 3 and 4 tokens old in training, as it is in chains of drafts.
OFFSET_WEIGHTS = (0.55, 0.2, 0.15, 0.1)
GRADIENT_NORM = 1.0
# Losses are read from the device and reported this often. Each time the host waits until the device has finished its work.
REPORT_INTERVAL_S = 0.5


def fit_heads(run: Run, material: TrainingData, vocabulary: DraftVocabulary) -> dict[int, ExitHead]:
    """Depth -> trained head, rounded as published; read from disk if an earlier run has trained them. Raises `Cancelled`."""
    heads = new_heads(run, vocabulary.device)
    path = run.folder / "heads.safetensors"
    if path.exists():
        _load_heads(heads, path)
        return heads

    def on_step(done: float, losses: dict[str, float]) -> None:
        run.figures.update(losses)
        run.report("training_heads", RISK_TEXT_ENDS + (HEADS_END - RISK_TEXT_ENDS) * done)

    train_heads(
        heads,
        material.chunks["heads"],
        vocabulary,
        replace(run.plan.training, seconds=run.seconds_until(HEADS_END)),
        should_stop=run.should_stop,
        on_step=on_step,
    )
    for head in heads.values():
        round_weights(head)
        head.eval().requires_grad_(False)
    stored = {f"{d}.{n}": t.cpu() for d, h in heads.items() for n, t in h.state_dict().items()}
    write_atomically(path, save(stored))
    return heads


def new_heads(run: Run, device: torch.device) -> dict[int, ExitHead]:
    """Depth -> untrained head. The initial weights depend on the seed alone."""
    parts = run.loaded.parts
    gain = getattr(parts.final_norm, "weight", None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.spec.seed)
        return {
            depth: ExitHead(
                run.spec.head_form,
                run.loaded.hidden_size,
                head_width(parts.head),
                run.plan.rank if run.spec.head_form == "gated" else 0,
                gain if isinstance(gain, Tensor) and gain.device.type != "meta" else None,
            ).to(device)
            for depth in run.plan.depths
        }


def _load_heads(heads: dict[int, ExitHead], path: Path) -> None:
    tensors = load(path.read_bytes())
    for depth, head in heads.items():
        prefix = f"{depth}."
        head.load_state_dict(
            {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
        )


@dataclass(frozen=True)
class Batch:
    """states: depth -> [B, D]; deep [B, D]; distance [B] int64; choices [B] int64, indices in the draft vocabulary or -1."""

    states: dict[int, Tensor]
    deep: Tensor
    distance: Tensor
    choices: Tensor


def gather_batch(
    chunk: StateChunk, index: Tensor, distance: Tensor, lookup: Tensor, device: torch.device
) -> Batch:
    """The positions `index` [B] of a chunk, each with the deep state `distance` [B] >= 1 positions back, or the oldest of its sequence.

    `chunk` and `lookup` [V] must be on `device`; `index` and `distance` may be anywhere.
    """
    index, distance = index.to(device), distance.to(device)
    distance = torch.minimum(distance, chunk.num_before[index])
    rows = chunk.rows[index]
    return Batch(
        states={depth: state[rows].float() for depth, state in chunk.states.items()},
        deep=chunk.deep[rows - distance].float(),
        distance=distance,
        choices=lookup[chunk.choices[index]],
    )


def draw_distances(size: int, generator: torch.Generator) -> Tensor:
    """[size] int64 in [1, NUM_OFFSETS], distributed by OFFSET_WEIGHTS."""
    weights = torch.tensor(OFFSET_WEIGHTS[:NUM_OFFSETS])
    return 1 + torch.multinomial(weights, size, replacement=True, generator=generator)


def train_heads(
    heads: Mapping[int, ExitHead],
    chunks: Sequence[StateChunk],
    vocabulary: DraftVocabulary,
    params: HeadTraining,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[float, dict[str, float]], None] | None = None,
) -> None:
    """Trains all heads together, in place, over several epochs of `chunks`.

    On a GPU, products are rounded to TF32. Training ends after `params.seconds`, and the learning rate follows whichever is further,
    epochs or time. `on_step` gets the share done and a running loss per depth, every REPORT_INTERVAL_S. Raises `Cancelled`.
    """
    if not chunks:
        return
    rows, bias, device = vocabulary.rows, vocabulary.bias, vocabulary.device
    weights = [p for head in heads.values() for p in head.parameters()]
    optimiser = torch.optim.AdamW(
        weights,
        lr=params.learning_rate,
        weight_decay=params.weight_decay,
        betas=(0.9, 0.98),
        fused=device.type == "cuda" or None,
    )
    start_s = time.monotonic()
    reported_s = -math.inf
    losses = {depth: rows.new_zeros(()) for depth in heads}
    for share, batch in _epochs(chunks, vocabulary.lookup.to(device), params, device):
        if should_stop():
            raise Cancelled("stopped while the exit heads were trained")
        done = max(share, (time.monotonic() - start_s) / params.seconds)
        if done >= 1.0:
            break
        warm_up = min(1.0, done / params.warm_up_share + 0.02)
        for group in optimiser.param_groups:
            group["lr"] = params.learning_rate * warm_up * 0.5 * (1 + math.cos(math.pi * done))
        total = rows.new_zeros(())
        with torch.enable_grad(), _tf32_products():
            for depth, head in heads.items():
                adapted = head(batch.states[depth], batch.deep, batch.distance)
                loss = F.cross_entropy(
                    F.linear(adapted, rows, bias), batch.choices, ignore_index=-1
                )
                losses[depth].lerp_(loss.detach(), 0.02)
                total = total + loss
            optimiser.zero_grad()
            total.backward()
        torch.nn.utils.clip_grad_norm_(weights, GRADIENT_NORM)
        optimiser.step()
        if on_step is not None and time.monotonic() - reported_s >= REPORT_INTERVAL_S:
            reported_s = time.monotonic()
            on_step(done, {f"depth-{d}.loss": float(value) for d, value in losses.items()})


@contextmanager
def _tf32_products() -> Iterator[None]:
    """Scope in which a GPU multiplies float32 matrices in TF32. No effect on a CPU."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _epochs(
    chunks: Sequence[StateChunk], lookup: Tensor, params: HeadTraining, device: torch.device
) -> Iterator[tuple[float, Batch]]:
    """Yields (share done, batch) over all epochs, without positions whose choice is outside the draft vocabulary.

    `lookup` [V] must be on `device`. One chunk at a time is in memory.
    """
    for epoch in range(params.epochs):
        generator = torch.Generator().manual_seed((params.seed * 1009 + epoch) % 2**63)
        order = torch.randperm(len(chunks), generator=generator).tolist()
        for place, which in enumerate(order):
            chunk = chunks[which].to(device)
            usable = torch.nonzero(lookup[chunk.choices] >= 0)[:, 0].cpu()
            shuffled = usable[torch.randperm(len(usable), generator=generator)]
            batches = shuffled.split(params.batch_size)
            for number, index in enumerate(batches):
                share = (epoch + (place + number / len(batches)) / len(chunks)) / params.epochs
                distance = draw_distances(len(index), generator)
                yield share, gather_batch(chunk, index, distance, lookup, device)
