"""Exit heads are solved in closed form. Where there is text and time, training by gradients goes on from there."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.plan import HeadTraining
from calibrator_service.calibration.ranks import Ranks
from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.states.chunk import StateChunk
from calibrator_service.calibration.states.training_data import TrainingData
from calibrator_service.calibration.training.closed_form import solve_head
from calibrator_service.calibration.training.draft_vocabulary import DraftVocabulary
from calibrator_service.calibration.training.objectives import ChainObjective, make_teacher
from shared.errors import Cancelled, Corrupt
from shared.ladder.artefact import round_weights, take_part
from shared.ladder.exit_head import ExitHead
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.dtypes import multiplies_bfloat16

SAVE_INTERVAL_S = 60.0


@dataclass(frozen=True)
class TrainingPlace:
    """The next chunk: the `chunk`-th of the `epoch`, in that epoch's order.
    `done`: share of the training that is done."""

    epoch: int = 0
    chunk: int = 0
    done: float = 0.0


class TrainingCheckpoint:
    """Weights and optimiser of a training, in one file. `path` None: nothing is kept."""

    def __init__(self, path: Path | None, heads: nn.ModuleDict, optimiser: torch.optim.Optimizer) -> None:
        self._path, self._heads, self._optimiser = path, heads, optimiser
        self._saved_s = time.monotonic()

    def load(self) -> TrainingPlace:
        """Restores weights and optimiser. The start if there is no file. Raises `Corrupt`."""
        if self._path is None or not self._path.exists():
            return TrainingPlace()
        try:
            with safe_open(self._path, framework="pt") as file:
                place = TrainingPlace(**json.loads((file.metadata() or {})["place"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self._heads.load_state_dict(take_part(tensors, "head"))
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in take_part(tensors, "optimiser").items():
                number, field = name.split(".")
                state.setdefault(int(number), {})[field] = tensor
            groups = self._optimiser.state_dict()["param_groups"]
            self._optimiser.load_state_dict({"state": state, "param_groups": groups})
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise Corrupt(f"{self._path.name} is not a checkpoint of this training") from error
        return place

    def save(self, place: TrainingPlace) -> None:
        """Writes the file, if SAVE_INTERVAL_S have passed since it was last written."""
        if self._path is None or time.monotonic() - self._saved_s < SAVE_INTERVAL_S:
            return
        tensors = {f"head.{name}": t for name, t in self._heads.state_dict().items()}
        for number, fields in self._optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{number}.{field}": t for field, t in fields.items()}
        on_host = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        write_atomically(self._path, save(on_host, {"place": json.dumps(vars(place))}))
        self._saved_s = time.monotonic()

    def delete(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


GRADIENT_NORM = 1.0
# Losses are read from the device and reported this often.
# Each time the host waits until the device has finished its work.
REPORT_INTERVAL_S = 0.5
# Share of a step's loss in the running mean.
LOSS_SHARE = 0.02


def fit_heads(
    run: CalibrationRun, runner: ContiguousRunner, material: TrainingData, vocabulary: DraftVocabulary
) -> dict[int, ExitHead]:
    """Depth -> head, rounded as published; trained heads are read from disk if an earlier run has trained them.
    Raises `Cancelled`."""
    ends = run.schedule
    run.report("training_heads", ends.collecting)
    heads = {}
    if run.ranks.is_first:
        heads = {depth: solve_head(moments, run.plan.mlp_width).cpu() for depth, moments in material.moments.items()}
    heads = {depth: head.to(vocabulary.device) for depth, head in run.ranks.firsts(heads).items()}
    if not run.plan.trains:
        return {depth: _published(head) for depth, head in heads.items()}
    path = run.folder / "heads.safetensors"
    if run.ranks.firsts(path.exists()):
        if run.ranks.is_first:
            _load_heads(heads, path)
        return heads

    def on_step(done: float, losses: dict[str, float]) -> None:
        run.figures.update(losses)
        run.report("training_heads", ends.collecting + (ends.heads - ends.collecting) * done)

    train_heads(
        heads,
        material.chunks["heads"],
        vocabulary,
        replace(run.plan.training, seconds=run.seconds_until(ends.heads)),
        ChainObjective(heads, vocabulary, runner.num_layers, make_teacher(runner, vocabulary)),
        checkpoint=run.folder / "training.safetensors",
        should_stop=run.should_stop,
        on_step=on_step,
        ranks=run.ranks,
    )
    heads = {depth: _published(head) for depth, head in heads.items()}
    stored = {f"{d}.{n}": t.cpu() for d, h in heads.items() for n, t in h.state_dict().items()}
    write_atomically(path, save(stored))
    return heads


def _published(head: ExitHead) -> ExitHead:
    """The head with its weights as they are published."""
    round_weights(head)
    return head.eval().requires_grad_(False)


def _load_heads(heads: Mapping[int, ExitHead], path: Path) -> None:
    tensors = load(path.read_bytes())
    for depth, head in heads.items():
        head.load_state_dict(take_part(tensors, str(depth)))


def train_heads(
    heads: Mapping[int, ExitHead],
    chunks: Sequence[StateChunk],
    vocabulary: DraftVocabulary,
    params: HeadTraining,
    objective: ChainObjective,
    *,
    checkpoint: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[float, dict[str, float]], None] | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Trains the heads together on the vocabulary's device, in place.

    Matmuls are computed in a format that the device multiplies faster: see `_fast_matmuls`. Training ends after
    `params.seconds`, and the learning rate follows whichever is further, epochs or time. `checkpoint`: the file from
    which a training that was killed continues; deleted at the end. `on_step` gets the share done and a running loss per
    depth, every REPORT_INTERVAL_S. Several `ranks` have chunks of their own, and average the gradients of batches that
    together have the size of one rank's; without any chunk at one of them nothing is trained. Raises `Cancelled`.
    """
    ranks = ranks or Ranks()
    if not all(ranks.everyones(len(chunks))):
        return
    device = vocabulary.device
    weights = [p for head in heads.values() for p in head.parameters()]
    optimiser = torch.optim.AdamW(
        weights,
        lr=params.learning_rate,
        weight_decay=params.weight_decay,
        betas=(0.9, 0.98),
        fused=device.type == "cuda" or None,
    )
    module = nn.ModuleDict({str(d): h for d, h in heads.items()})
    saved = TrainingCheckpoint(checkpoint, module, optimiser)
    start = saved.load()
    if ranks.size > 1:
        # All go on from what the first one has saved, each in its own text.
        weights_of, optimiser_of, done = ranks.firsts((module.state_dict(), optimiser.state_dict(), start.done))
        module.load_state_dict(weights_of)
        optimiser.load_state_dict(optimiser_of)
        start = replace(start, done=done) if done else TrainingPlace()
        params = replace(params, batch_size=-(-params.batch_size // ranks.size))
    start_s = time.monotonic()
    reported_s = -math.inf
    # Running means, which begin with the first step's losses.
    losses: dict[int, Tensor] = {}
    done = start.done
    for place, chunk, batches in _epochs(chunks, vocabulary, params, start):
        for number, index in enumerate(batches):
            share = (place.epoch + (place.chunk + number / len(batches)) / len(chunks)) / params.epochs
            by_time = (time.monotonic() - start_s) / params.seconds
            done = max(share, start.done + (1 - start.done) * by_time)
            done, is_cancelled = ranks.means((done, float(should_stop())))
            if is_cancelled:
                raise Cancelled("stopped while the exit heads were trained")
            if done >= 1.0:
                break
            warm_up = min(1.0, done / params.warm_up_share + 0.02)
            for group in optimiser.param_groups:
                group["lr"] = params.learning_rate * warm_up * 0.5 * (1 + math.cos(math.pi * done))
            with torch.enable_grad():
                with _fast_matmuls(device):
                    step_losses = objective.losses(chunk, index)
                optimiser.zero_grad()
                torch.stack(list(step_losses.values())).sum().backward()
            ranks.average([weight.grad for weight in weights if weight.grad is not None])
            for depth, loss in step_losses.items():
                losses.setdefault(depth, loss.detach().clone()).lerp_(loss.detach(), LOSS_SHARE)
            torch.nn.utils.clip_grad_norm_(weights, GRADIENT_NORM)
            optimiser.step()
            if on_step is not None and time.monotonic() - reported_s >= REPORT_INTERVAL_S:
                reported_s = time.monotonic()
                on_step(done, {f"depth-{d}.loss": float(value) for d, value in losses.items()})
        if done >= 1.0:
            break
        saved.save(replace(place, chunk=place.chunk + 1, done=done))
    saved.delete()


@contextmanager
def _fast_matmuls(device: torch.device) -> Iterator[None]:
    """Scope in which a GPU multiplies float32 matrices in TF32, and a processor with bfloat16 matmuls in bfloat16,
    which is several times as fast. Sums, norms, weights and the optimiser stay in float32."""
    if device.type == "cpu" and multiplies_bfloat16():
        with torch.autocast("cpu", torch.bfloat16):
            yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _epochs(
    chunks: Sequence[StateChunk], vocabulary: DraftVocabulary, params: HeadTraining, start: TrainingPlace
) -> Iterator[tuple[TrainingPlace, StateChunk, Sequence[Tensor]]]:
    """Yields each chunk of endless epochs from `start` on, with its batches of positions whose choice is in the draft
    vocabulary.

    One chunk at a time is in memory. A chunk's batches depend on the seed and its place alone, so training can continue
    anywhere.
    """
    device, lookup = vocabulary.device, vocabulary.lookup.to(vocabulary.device)
    for epoch in count(start.epoch):
        seed = (params.seed * 1009 + epoch) % 2**63
        order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(seed)).tolist()
        for number in range(start.chunk if epoch == start.epoch else 0, len(chunks)):
            chunk = chunks[order[number]].to(device)
            generator = torch.Generator().manual_seed((seed * 100_003 + number) % 2**63)
            usable = torch.nonzero(lookup[chunk.choices] >= 0)[:, 0].cpu()
            shuffled = usable[torch.randperm(len(usable), generator=generator)]
            yield TrainingPlace(epoch, number), chunk, shuffled.split(params.batch_size)
