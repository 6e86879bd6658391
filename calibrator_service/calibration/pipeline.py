"""The whole calibration: collect, train heads, train routers, measure. Streaming, bounded, resumable."""

import hashlib
import itertools
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from calibrator_service.calibration.collect import Collector, LabelledSequence
from calibrator_service.calibration.evaluate import exit_figures, table_figures, tokens_per_pass
from calibrator_service.calibration.presets import (
    COLLECTING_ENDS,
    HEADS_END,
    MAX_STATE_BYTES,
    ROUTERS_END,
    Plan,
    bounded,
    quick,
    resolve,
)
from calibrator_service.calibration.selfgen import SelfgenConfig, SelfGenerator
from calibrator_service.calibration.shards import TokenSequence, write_atomically
from calibrator_service.calibration.sources import text_sequences
from calibrator_service.calibration.spec import (
    CalibrationResult,
    CalibrationSpec,
    Phase,
    Progress,
    SelfGenerated,
)
from calibrator_service.calibration.splits import SPLITS, Split, Splitter
from calibrator_service.calibration.tables import fit_table_routers
from calibrator_service.calibration.train_heads import train_heads, vocabulary_lookup
from calibrator_service.calibration.train_routers import exit_samples, train_router
from shared.errors import Cancelled, Corrupt, InvalidInput
from shared.ladder.artefact import round_weights
from shared.ladder.head_rows import gather_rows, head_width, projection
from shared.ladder.heads import ExitHead
from shared.ladder.ladder import Ladder, LayerExit, ModelIdentity
from shared.ladder.rungs import exit_name
from shared.ladder.successor_builder import SuccessorBuilder
from shared.ladder.table_router import fit_table_router
from shared.model.load import LoadedModel
from shared.model.own_thread import in_own_thread
from shared.model.runner import DepthRunner

logger = logging.getLogger(__name__)

# Tokens of the routers and report splits each that rung 0 is judged on; they are held in memory.
MAX_JUDGED_TOKENS = 100_000
# A model that only ever repeats itself would write for ever: after so many known sequences in a row, that was all.
MAX_STALE_SEQUENCES = 2000


def calibrate(
    loaded: LoadedModel,
    spec: CalibrationSpec | None = None,
    *,
    work_dir: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> CalibrationResult:
    """A ladder for a frozen model, with its held-out figures. Without a spec, or bounds in it: `presets.quick`.

    `work_dir` keeps what was collected and trained, so that a killed run continues where it was; the same spec, model and folder
    give the same ladder (unless a time budget cuts differently). It may be deleted afterwards; None: a temporary folder.
    Raises `InvalidInput`, `NotFound` and `Unavailable` for sources that do not work, `Cancelled` when `should_stop`,
    `Corrupt` for a work folder that was tampered with, and `Exhausted` for a full disk.
    """
    spec = bounded(spec) if spec else quick(loaded.model_id)
    folder = work_dir or Path(tempfile.mkdtemp(prefix="neap-calibration-"))
    try:
        job = _Calibration(loaded, spec, folder, progress, should_stop)
        return in_own_thread(job.run)
    finally:
        if work_dir is None:
            shutil.rmtree(folder, ignore_errors=True)


class _Calibration:
    def __init__(
        self,
        loaded: LoadedModel,
        spec: CalibrationSpec,
        folder: Path,
        progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self.started = time.monotonic()
        self.loaded, self.spec = loaded, spec
        self.plan: Plan = resolve(spec, loaded)
        identity = json.dumps({**asdict(spec), "model": loaded.fingerprint, "format": 1})
        # Generated text is shared by every spec that asks for the same; states and heads are this spec's own.
        self.text_folder = folder / "text"
        self.folder = folder / hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.should_stop = should_stop
        self._progress, self._fraction = progress, 0.0
        self.figures: dict[str, float] = {}
        self._spent_before = self._read_spent()
        self.judged: dict[Split, list[LabelledSequence]] = {"routers": [], "report": []}
        self.num_tokens: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        self.frequencies = torch.zeros(loaded.vocabulary_size, dtype=torch.long)
        self.builder = SuccessorBuilder()
        self.seconds: dict[str, float] = {}

    # --- time and progress

    def elapsed_s(self) -> float:
        return self._spent_before + time.monotonic() - self.started

    def left_s(self, share: float) -> float:
        """Seconds until `share` of the budget is spent."""
        return max(share * self.plan.budget_s - self.elapsed_s(), 0.05)

    def _read_spent(self) -> float:
        try:
            return float(json.loads((self.folder / "state.json").read_text())["elapsed_s"])
        except FileNotFoundError:
            return 0.0
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt("the calibration's state file cannot be read") from error

    def save_spent(self) -> None:
        write_atomically(
            self.folder / "state.json", json.dumps({"elapsed_s": self.elapsed_s()}).encode()
        )

    def tell(self, phase: Phase, fraction: float) -> None:
        if self.should_stop():
            raise Cancelled("the calibration was cancelled")
        self._fraction = max(self._fraction, min(fraction, 1.0))
        self._progress(Progress(phase, self._fraction, dict(self.figures)))

    # --- the phases

    def run(self) -> CalibrationResult:
        self.tell("loading", 0.0)
        self.runner = DepthRunner(self.loaded)
        self.collector = Collector(
            self.runner,
            self.plan.depths,
            self.folder,
            max_state_bytes=MAX_STATE_BYTES,
            cosine_threshold=self.spec.cosine_threshold if self.spec.label == "cosine" else None,
        )
        self._timed("collecting", self.collect)
        vocabulary = self.draft_vocabulary()
        rows, bias = gather_rows(self.loaded.parts.head, vocabulary)
        lookup = vocabulary_lookup(vocabulary, self.loaded.vocabulary_size)
        heads = self._timed("training_heads", lambda: self.train_heads(rows, bias, lookup))
        ladder = self._timed(
            "training_routers", lambda: self.train_routers(heads, vocabulary, rows, bias, lookup)
        )
        report = self._timed("evaluating", lambda: self.evaluate(ladder, rows, bias, lookup))
        measured = tuple(
            replace(layer_exit, agreement=report["rungs"][layer_exit.name]["agreement"])
            for layer_exit in ladder.exits
        )
        ladder = replace(ladder, exits=measured)
        report["seconds"] = {**self.seconds, "total": self.elapsed_s()}
        self.tell("publishing", 1.0)
        return CalibrationResult(ladder, report)

    def _timed(self, phase: str, work: Callable[[], Any]) -> Any:
        before = time.monotonic()
        result = work()
        self.seconds[phase] = time.monotonic() - before
        self.save_spent()
        return result

    def sequences(self, is_late: Callable[[], bool]) -> Iterator[TokenSequence]:
        if not isinstance(self.spec.source, SelfGenerated):
            yield from text_sequences(self.loaded, self.spec.source)
            return
        config = SelfgenConfig(
            seed=self.spec.seed,
            prompts=self.spec.source.prompts,
            max_new_tokens=self.plan.max_new_tokens,
            rows=self.plan.rows,
        )
        generator = SelfGenerator(self.loaded, config, self.text_folder)
        shards = generator.shards(
            should_stop=self.should_stop, is_late=is_late, on_tokens=self._on_generated
        )
        for shard in shards:
            yield from shard

    def _on_generated(self, num_tokens: int) -> None:
        self.figures["generated_tokens"] = self.figures.get("generated_tokens", 0.0) + num_tokens
        self._tell_collected()

    def _tell_collected(self) -> None:
        total = sum(self.num_tokens.values())
        self.figures["tokens"] = float(total)
        by_time = self.elapsed_s() / (COLLECTING_ENDS * self.plan.budget_s)
        by_tokens = total / self.plan.max_tokens
        self.tell("collecting", COLLECTING_ENDS * min(1.0, max(by_time, by_tokens)))

    def collect(self) -> None:
        """Passes the source through the model until there are enough tokens or the phase's time is over."""
        splitter = Splitter()

        def is_late() -> bool:
            return self.elapsed_s() > 0.85 * COLLECTING_ENDS * self.plan.budget_s

        num_queued = num_stale = 0
        for sequence in self.sequences(is_late):
            split = splitter.deal(sequence)
            num_stale = 0 if split is not None else num_stale + 1
            if split is not None:
                num_queued += len(sequence.tokens) - sequence.answer_start or len(sequence.tokens)
                self._take(split, self.collector.add(split, sequence))
                self._tell_collected()
            if (
                num_queued >= self.plan.max_tokens
                or num_stale >= MAX_STALE_SEQUENCES
                or self._is_over(is_late)
            ):
                break
        for split in SPLITS:
            self._take(split, self.collector.finish(split))
            self._tell_collected()
            if self.num_tokens[split] == 0:
                raise self._too_little_text(split, is_cut=is_late())

    def _too_little_text(self, split: Split, *, is_cut: bool) -> InvalidInput:
        cause = "the source gave too little text"
        if is_cut:
            # Perhaps nobody asked for that budget: it is the default.
            cause = (
                f"{self.plan.budget_s:.0f} seconds were too short a time budget for this model and "
                "source; give a larger one, or max_tokens"
            )
        return InvalidInput(
            f"{cause}: nothing is left for the {split} split", reason="TOO_LITTLE_TEXT"
        )

    def _is_over(self, is_late: Callable[[], bool]) -> bool:
        # Generated text ends by itself, with what the last shard has.
        return not isinstance(self.spec.source, SelfGenerated) and is_late()

    def _take(self, split: Split, labelled: list[LabelledSequence]) -> None:
        for sequence in labelled:
            size = len(sequence.tokens) - sequence.first
            self.num_tokens[split] += size
            if split == "heads":
                self.builder.add(sequence.tokens, sequence.choices, sequence.first)
                self.frequencies += torch.bincount(
                    torch.from_numpy(sequence.choices[sequence.first :]),
                    minlength=len(self.frequencies),
                )
            elif sum(len(s.tokens) for s in self.judged[split]) < MAX_JUDGED_TOKENS:
                self.judged[split].append(sequence)

    def draft_vocabulary(self) -> Tensor:
        """The tokens the full model chose most in the heads split, ascending; never one it did not choose."""
        num_seen = int((self.frequencies > 0).sum())
        size = min(self.plan.draft_vocabulary_size, num_seen)
        order = torch.argsort(self.frequencies, descending=True, stable=True)
        return order[:size].sort().values

    def train_heads(self, rows: Tensor, bias: Tensor | None, lookup: Tensor) -> dict[int, ExitHead]:
        norm = self.loaded.parts.final_norm
        gain = getattr(norm, "weight", None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.spec.seed % 2**63)
            heads = {
                depth: ExitHead(
                    self.spec.head_form,
                    self.loaded.hidden_size,
                    head_width(self.loaded.parts.head),
                    self.plan.rank if self.spec.head_form == "gated" else 0,
                    gain if isinstance(gain, Tensor) and gain.device.type != "meta" else None,
                ).to(rows.device)
                for depth in self.plan.depths
            }
        path = self.folder / "heads.safetensors"
        if path.exists():
            tensors = load(path.read_bytes())
            for depth, head in heads.items():
                prefix = f"{depth}."
                head.load_state_dict(
                    {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
                )
            return heads

        def on_step(done: float, losses: dict[str, float]) -> None:
            self.figures.update(losses)
            self.tell("training_heads", COLLECTING_ENDS + (HEADS_END - COLLECTING_ENDS) * done)

        train_heads(
            heads,
            self.collector.chunks("heads"),
            rows,
            bias,
            lookup,
            replace(self.plan.training, seconds=self.left_s(HEADS_END)),
            should_stop=self.should_stop,
            on_step=on_step,
        )
        for head in heads.values():
            round_weights(head)
            head.eval().requires_grad_(False)
        stored = {f"{d}.{n}": t.cpu() for d, h in heads.items() for n, t in h.state_dict().items()}
        write_atomically(path, save(stored))
        return heads

    def train_routers(
        self,
        heads: dict[int, ExitHead],
        vocabulary: Tensor,
        rows: Tensor,
        bias: Tensor | None,
        lookup: Tensor,
    ) -> Ladder:
        blank = fit_table_router([], [])
        ladder = Ladder(
            ModelIdentity.of(self.loaded),
            suffix_router=blank,
            successors=self.builder.build(self.plan.table_bytes),
            successor_router=blank,
        )
        suffix_router, successor_router = fit_table_routers(ladder, self.judged["routers"])
        exits = []
        project = projection(rows, bias)
        for number, (depth, head) in enumerate(heads.items(), 1):
            samples = exit_samples(
                depth,
                head,
                self.collector.chunks("routers"),
                project,
                lookup,
                self.spec.label,
                seed=self.spec.seed,
                device=rows.device,
            )
            share = HEADS_END + (ROUTERS_END - HEADS_END) * number / len(heads)
            router = train_router(
                samples,
                self.spec.router_width,
                seed=self.spec.seed,
                seconds=self.left_s(share),
                should_stop=self.should_stop,
            )
            exits.append(LayerExit(depth, head, router))
            self.tell("training_routers", share)
        return replace(
            ladder,
            suffix_router=suffix_router,
            successor_router=successor_router,
            exits=tuple(exits),
            draft_vocabulary=vocabulary,
        )

    def evaluate(
        self, ladder: Ladder, rows: Tensor, bias: Tensor | None, lookup: Tensor
    ) -> dict[str, Any]:
        held_out = self.judged["report"]
        rungs = table_figures(ladder, held_out)
        self.tell("evaluating", 0.95)
        chunks = self.collector.chunks("report")
        rungs |= exit_figures(
            ladder, self.runner, chunks, rows, bias, lookup, self.spec.label, self.spec.seed
        )
        simulated = tokens_per_pass(ladder, held_out)
        for name, figure in rungs.items():
            for key, value in figure.items():
                if isinstance(value, float):
                    self.figures[f"{name}.{key}"] = value
        self.figures.update(simulated)
        self.tell("evaluating", 0.99)
        covered = lookup[torch.from_numpy(_choices(held_out))] >= 0
        return {
            "rungs": rungs,
            "simulated": simulated,
            "tokens": {**self.num_tokens, "total": sum(self.num_tokens.values())},
            "draft_vocabulary_coverage": float(covered.float().mean()),
            "successor_entries": ladder.successors.num_entries if ladder.successors else 0,
            "spec": asdict(self.spec),
            "depths": [exit_name(depth) for depth in self.plan.depths],
        }


def _choices(sequences: list[LabelledSequence]) -> Any:
    import numpy as np

    parts = itertools.chain.from_iterable([s.choices[s.first :]] for s in sequences)
    return np.concatenate(list(parts))
