"""Routers of layer exits learn when their exit is right, on sequences that the heads have not seen."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrator_service.calibration.labels import agreement
from calibrator_service.calibration.spec import Label
from calibrator_service.calibration.state_chunk import StateChunk, read_chunk
from calibrator_service.calibration.train_heads import draw_ago, gather_batch
from shared.errors import Cancelled
from shared.ladder.artefact import round_weights
from shared.ladder.heads import ExitHead
from shared.ladder.routers import DepthRouter, scalar_features

# Positions per router at most: they are held in memory, as float16.
MAX_SAMPLES = 100_000
# The last samples calibrate what the others trained: a tenth, but where there are few, up to a third.
HELD_OUT, HELD_OUT_OF_FEW, FEW = 10, 3, 1000
PASS_SIZE = 1024


@dataclass(frozen=True)
class RouterSamples:
    """What one exit says at N positions: adapted [N, head_width] float16, scalars [N, 3], label [N] bool."""

    adapted: Tensor
    scalars: Tensor
    label: Tensor

    def __len__(self) -> int:
        return len(self.label)


@torch.no_grad()
def exit_samples(
    depth: int,
    head: ExitHead,
    chunks: Sequence[Path],
    project: Callable[[Tensor], Tensor],
    lookup: Tensor,
    label: Label,
    *,
    seed: int,
    device: torch.device,
    read: Callable[[Path], StateChunk] = read_chunk,
) -> RouterSamples:
    """Runs one exit as it will be served over the positions of `chunks`, MAX_SAMPLES at most, with ago drawn as in training."""
    adapted, scalars, labels = [], [], []
    num_samples = 0
    generator = torch.Generator().manual_seed(seed % 2**63)
    lookup = lookup.to(device)
    for path in chunks:
        chunk = read(path).to(device)
        ago = draw_ago(max(len(chunk), 1), generator)
        size = min(len(chunk), MAX_SAMPLES - num_samples)
        for index in torch.arange(size).split(PASS_SIZE):
            batch = gather_batch(chunk, index, ago[index], lookup, device)
            state = head(batch.states[depth], batch.deep, batch.ago)
            logits = project(state)
            converged = chunk.converged.get(depth)
            reached = (
                torch.zeros(len(index), dtype=torch.bool)
                if converged is None
                else converged.cpu()[index]
            )
            adapted.append(state.half().cpu())
            scalars.append(scalar_features(logits, batch.ago).cpu())
            labels.append(agreement(label, logits.argmax(-1).cpu(), batch.choices.cpu(), reached))
        num_samples += size
        if num_samples >= MAX_SAMPLES:
            break
    if not labels:
        width = head.head_width
        return RouterSamples(
            torch.zeros(0, width), torch.zeros(0, 3), torch.zeros(0, dtype=torch.bool)
        )
    return RouterSamples(torch.cat(adapted), torch.cat(scalars), torch.cat(labels))


def train_router(
    samples: RouterSamples,
    width: int,
    *,
    seed: int,
    seconds: float = math.inf,
    epochs: int = 8,
    should_stop: Callable[[], bool] = lambda: False,
) -> DepthRouter:
    """A router trained on all but the last of `samples` and calibrated on those. Rounded as shipped. Raises `Cancelled`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        router = DepthRouter(samples.adapted.shape[1], width)
    num_held_out = max(len(samples) // HELD_OUT, min(len(samples) // HELD_OUT_OF_FEW, FEW))
    num_fitted = len(samples) - num_held_out
    optimiser = torch.optim.AdamW(router.parameters(), lr=1e-3, weight_decay=0.05)
    generator = torch.Generator().manual_seed(seed % 2**63)
    started = time.monotonic()
    batches = max(1, num_fitted // 256)
    for epoch in range(epochs if num_fitted else 0):
        for number, index in enumerate(torch.randperm(num_fitted, generator=generator).split(256)):
            if should_stop():
                raise Cancelled("stopped while the routers were trained")
            share = (epoch + number / batches) / epochs
            done = max(share, (time.monotonic() - started) / seconds)
            if done >= 1.0:
                break
            for group in optimiser.param_groups:
                group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
            with torch.enable_grad():
                score = router.score(samples.adapted[index].float(), samples.scalars[index])
                loss = F.binary_cross_entropy_with_logits(score, samples.label[index].float())
                optimiser.zero_grad()
                loss.backward()
            optimiser.step()
    round_weights(router)
    calibrate_router(router, samples, num_fitted)
    round_weights(router)
    return router.eval().requires_grad_(False)


@torch.no_grad()
def calibrate_router(router: DepthRouter, samples: RouterSamples, first: int) -> None:
    """Platt scaling on samples[first:]: slope (not negative) and shift that minimise the log loss, by Newton's method.

    A weak prior (ten samples' worth towards slope 1 and the smoothed base rate) keeps a handful of samples from deciding.
    """
    score = router.score(samples.adapted[first:].float(), samples.scalars[first:]).double()
    target = samples.label[first:].double()
    slope, shift = 1.0, 0.0
    for _ in range(30):
        p = torch.sigmoid(slope * score + shift)
        weight = (p * (1 - p)).clamp_min(1e-9)
        gradient = torch.stack(
            [((p - target) * score).sum() + 10 * (slope - 1), (p - target).sum() + shift]
        )
        cross = (weight * score).sum()
        hessian = torch.stack(
            [
                torch.stack([(weight * score**2).sum() + 10, cross]),
                torch.stack([cross, weight.sum() + 1]),
            ]
        )
        step = torch.linalg.solve(hessian, gradient).clamp(-2, 2)
        slope, shift = slope - float(step[0]), shift - float(step[1])
        if float(step.abs().max()) < 1e-6:
            break
    router.slope.fill_(max(slope, 0.0))
    router.shift.fill_(shift)
