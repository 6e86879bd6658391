"""Confidence heads learn when their proposer is right, on sequences that the heads were not trained on.
With them the ladder is complete."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.spec import Label
from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.collect import agreement
from calibrator_service.calibration.states.training_data import TrainingData
from calibrator_service.calibration.training.chain_outputs import chain_outputs
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.logistic import fit_logistic
from shared.errors import Cancelled
from shared.ladder.artefact import round_weights
from shared.ladder.confidence_head import NUM_SCALARS, ConfidenceHead, scalar_features
from shared.ladder.exit_head import ExitHead
from shared.ladder.exits import LayerExit
from shared.ladder.ladder import Ladder

# Positions per confidence head, which are held in memory as float16.
MAX_SAMPLES = 100_000
# Samples of one position in HELD_OUT_INTERVAL are held out to calibrate the confidence head. If these are fewer than
# MIN_HELD_OUT, up to one in MIN_HELD_OUT_INTERVAL. Samples come pass by pass, and of each pass place by place: the last
# ones would be of the chains' last place, and in a small set of one or two answers.
HELD_OUT_INTERVAL, MIN_HELD_OUT_INTERVAL, MIN_HELD_OUT = 10, 3, 1000
PASS_SIZE = 1024
BATCH_SIZE = 256
LEARNING_RATE = 1e-3
# Weight of the prior in the calibration, in samples.
PRIOR_SAMPLES = 10


def fit_ladder(
    run: CalibrationRun,
    material: TrainingData,
    tables: Ladder,
    vocabulary: DraftVocabulary,
    heads: Mapping[int, ExitHead],
) -> Ladder:
    """The ladder `tables` with exits that have these heads, with confidence heads trained on the confidence split.
    The agreement of its exits is not measured yet.

    Raises `Cancelled`.
    """
    exits = []
    for number, (depth, head) in enumerate(heads.items(), 1):
        samples = exit_samples(
            depth, head, material.chunks["confidence"], vocabulary, run.loaded.num_layers, run.spec.label
        )
        ends = run.schedule
        end_share = ends.heads + (ends.confidence - ends.heads) * number / len(heads)
        confidence = train_confidence(
            samples,
            run.spec.confidence_width,
            seed=run.spec.seed,
            seconds=run.seconds_until(end_share),
            should_stop=run.should_stop,
        )
        exits.append(LayerExit(depth, head, confidence))
        run.report("training_confidence", end_share)
    return replace(tables, exits=tuple(exits), draft_vocabulary=vocabulary.tokens if exits else None)


@dataclass(frozen=True)
class ConfidenceSamples:
    """One exit at N places of chains: adapted [N, D] float16, scalars [N, NUM_SCALARS], label [N] bool, and position
    [N] int64, the number of the text's position that each is about."""

    adapted: Tensor
    scalars: Tensor
    label: Tensor
    position: Tensor

    def __len__(self) -> int:
        return len(self.label)


@torch.no_grad()
def exit_samples(
    depth: int,
    head: ExitHead,
    chunks: Sequence[StateChunk],
    vocabulary: DraftVocabulary,
    num_layers: int,
    label: Label,
) -> ConfidenceSamples:
    """Runs one exit as it will be served, along chains from up to MAX_SAMPLES positions of `chunks`."""
    parts: list[ConfidenceSamples] = []
    num_samples, first = 0, 0
    for stored in chunks:
        chunk = stored.to(vocabulary.device)
        converged = chunk.converged.get(depth)
        for index in torch.arange(len(chunk)).split(PASS_SIZE):
            if num_samples >= MAX_SAMPLES:
                break
            for output in chain_outputs(depth, head, chunk, index, vocabulary, num_layers):
                reached = torch.zeros_like(output.choices, dtype=torch.bool)
                if converged is not None:
                    reached = converged[output.positions]
                labels = agreement(label, output.logits.argmax(-1).cpu(), output.choices.cpu(), reached.cpu())
                scalars = scalar_features(output.logits, output.chain_places)
                position = first + output.positions.cpu()
                parts.append(ConfidenceSamples(output.adapted.half().cpu(), scalars.cpu(), labels, position))
                num_samples += len(labels)
        first += len(chunk)
        if num_samples >= MAX_SAMPLES:
            break
    if not parts:
        return ConfidenceSamples(
            torch.zeros(0, head.hidden_size),
            torch.zeros(0, NUM_SCALARS),
            torch.zeros(0, dtype=torch.bool),
            torch.zeros(0, dtype=torch.long),
        )
    return ConfidenceSamples(
        torch.cat([part.adapted for part in parts]),
        torch.cat([part.scalars for part in parts]),
        torch.cat([part.label for part in parts]),
        torch.cat([part.position for part in parts]),
    )


def train_confidence(
    samples: ConfidenceSamples,
    width: int,
    *,
    seed: int,
    seconds: float = math.inf,
    epochs: int = 8,
    should_stop: Callable[[], bool] = lambda: False,
) -> ConfidenceHead:
    """A confidence head trained on most of `samples` and calibrated on the others; rounded as published.

    Training ends after `seconds`. Raises `Cancelled`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        confidence = ConfidenceHead(samples.adapted.shape[1], width)
    interval = min(HELD_OUT_INTERVAL, max(len(samples) // MIN_HELD_OUT, MIN_HELD_OUT_INTERVAL))
    is_held_out = samples.position % interval == interval - 1
    trained = (~is_held_out).nonzero()[:, 0]
    num_trained = len(trained)
    optimiser = torch.optim.AdamW(confidence.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    generator = torch.Generator().manual_seed(seed)
    start_s = time.monotonic()
    num_batches = max(1, num_trained // BATCH_SIZE)
    for epoch in range(epochs if num_trained else 0):
        shuffled = trained[torch.randperm(num_trained, generator=generator)]
        for number, index in enumerate(shuffled.split(BATCH_SIZE)):
            if should_stop():
                raise Cancelled("stopped while the confidence heads were trained")
            share = (epoch + number / num_batches) / epochs
            done = max(share, (time.monotonic() - start_s) / seconds)
            if done >= 1.0:
                break
            for group in optimiser.param_groups:
                group["lr"] = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
            with torch.enable_grad():
                score = confidence.score(samples.adapted[index].float(), samples.scalars[index])
                loss = F.binary_cross_entropy_with_logits(score, samples.label[index].float())
                optimiser.zero_grad()
                loss.backward()
            optimiser.step()
    round_weights(confidence)
    calibrate_confidence(confidence, samples, is_held_out.nonzero()[:, 0])
    round_weights(confidence)
    return confidence.eval().requires_grad_(False)


@torch.no_grad()
def calibrate_confidence(confidence: ConfidenceHead, samples: ConfidenceSamples, index: Tensor) -> None:
    """Platt scaling on samples[index]: sets the slope (at least 0) and shift that minimise the log loss.

    A weak prior, worth PRIOR_SAMPLES towards slope 1 and one towards shift 0, bounds the influence of a handful of
    samples.
    """
    score = confidence.score(samples.adapted[index].float(), samples.scalars[index])
    target = samples.label[index]
    features = torch.stack([score, torch.ones_like(score)], -1)
    slope, shift = fit_logistic(features, target, (1.0, 0.0), (PRIOR_SAMPLES, 1.0))
    confidence.slope.fill_(max(slope, 0.0))
    confidence.shift.fill_(shift)
