"""What a calibration learns from and is judged on: the source passed through the model, dealt to the splits."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from calibrator_service.calibration.collect import Collector, LabelledSequence
from calibrator_service.calibration.held_out import set_apart
from calibrator_service.calibration.presets import COLLECTING_ENDS, MAX_STATE_BYTES
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.selfgen import SelfgenConfig, SelfGenerator
from calibrator_service.calibration.shards import TokenSequence
from calibrator_service.calibration.sources import text_sequences
from calibrator_service.calibration.spec import SelfGenerated
from calibrator_service.calibration.splits import SPLITS, Split, Splitter
from calibrator_service.calibration.state_chunk import StateChunk
from shared.errors import InvalidInput
from shared.ladder.successor_builder import SuccessorBuilder
from shared.model.runner import Runner

# Tokens of the routers and report splits each that rung 0 is judged on; they are held in memory.
MAX_JUDGED_TOKENS = 100_000
# A model that only ever repeats itself would write for ever: after so many known sequences in a row, that was all.
MAX_STALE_SEQUENCES = 2000
# Of the work for a token of generated text, what is done when it is written; what is left is one pass over many at once.
WRITING_SHARE = 0.9


class Material:
    """Empty until `gather`.

    judged: sequences of the routers and report splits, for the tables; builder: the successor table of the heads split;
    num_tokens: learnt from, per split; splitter: has dealt the sequences. `selfgen` is what the text is made from, None for given
    text, and `risk_prompts` are those of the given prompts that are no part of it.
    """

    def __init__(self, run: Run, runner: Runner) -> None:
        self._run = run
        self._collector = Collector(
            runner,
            run.plan.depths,
            run.folder,
            max_state_bytes=MAX_STATE_BYTES,
            cosine_threshold=run.spec.cosine_threshold if run.spec.label == "cosine" else None,
            chunk_positions=run.plan.scale.chunk_positions,
            pass_tokens=run.plan.scale.pass_tokens,
            keeps_states=run.plan.scale.keeps_states,
        )
        self.judged: dict[Split, list[LabelledSequence]] = {"routers": [], "report": []}
        self.num_tokens: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        self.builder = SuccessorBuilder()
        self.splitter = Splitter()
        self.selfgen, self.risk_prompts = self._prompts()
        # Tokens dealt to the splits, and those of the shard that is being written.
        self._num_queued = self._num_writing = 0
        self._frequencies = torch.zeros(run.loaded.vocabulary_size, dtype=torch.long)

    def chunks(self, split: Split) -> list[Path]:
        """The split's files, for `read`."""
        return self._collector.chunks(split)

    def read(self, path: Path) -> StateChunk:
        """Raises `Corrupt`."""
        return self._collector.read(path)

    def frequent_choices(self, most: int) -> Tensor:
        """The tokens the full model chose most in the heads split, ascending; never one it did not choose. [<= most] int64."""
        num_seen = int((self._frequencies > 0).sum())
        order = torch.argsort(self._frequencies, descending=True, stable=True)
        return order[: min(most, num_seen)].sort().values

    def gather(self) -> None:
        """Passes the source through the model until there are enough tokens or the phase's time is over.

        Raises `InvalidInput` (TOO_LITTLE_TEXT), what the source raises, and `Cancelled`.
        """
        run = self._run

        def is_late() -> bool:
            return run.elapsed_s() > 0.85 * COLLECTING_ENDS * run.plan.budget_s

        num_stale = 0
        for sequence in self._sequences(is_late):
            split = self.splitter.deal(sequence)
            num_stale = 0 if split is not None else num_stale + 1
            if split is not None:
                self._num_queued += sequence.num_answer_tokens or len(sequence.tokens)
                self._take(split, self._collector.add(split, sequence))
                self._tell()
            if (
                self._num_queued >= run.plan.max_tokens
                or num_stale >= max(MAX_STALE_SEQUENCES, 2 * run.plan.rows)
                or self._is_over(is_late)
            ):
                break
        for split in SPLITS:
            self._take(split, self._collector.finish(split))
            self._tell()
            if self.num_tokens[split] == 0:
                raise self._too_little_text(split, is_cut=is_late())

    def _sequences(self, is_late: Callable[[], bool]) -> Iterator[TokenSequence]:
        run, source = self._run, self._run.spec.source
        if not isinstance(source, SelfGenerated):
            yield from text_sequences(run.loaded, source)
            return
        assert self.selfgen is not None
        generator = SelfGenerator(run.loaded, self.selfgen, run.text_folder)
        shards = generator.shards(
            should_stop=run.should_stop, is_late=is_late, on_tokens=self._on_generated
        )
        for shard in shards:
            self._num_writing = 0
            yield from shard

    def _prompts(self) -> tuple[SelfgenConfig | None, tuple[str, ...]]:
        run, source = self._run, self._run.spec.source
        if not isinstance(source, SelfGenerated):
            return None, ()
        config = SelfgenConfig(
            seed=run.spec.seed,
            prompts=source.prompts,
            max_new_tokens=run.plan.max_new_tokens,
            rows=run.plan.rows,
        )
        return set_apart(config)

    def _on_generated(self, num_tokens: int) -> None:
        figures = self._run.figures
        figures["generated_tokens"] = figures.get("generated_tokens", 0.0) + num_tokens
        self._num_writing += num_tokens
        self._tell()

    def _tell(self) -> None:
        run, total = self._run, sum(self.num_tokens.values())
        run.figures["tokens"] = float(total)
        by_time = run.elapsed_s() / (COLLECTING_ENDS * run.plan.budget_s)
        done, aim = float(total), run.plan.max_tokens
        if self.selfgen is not None:
            # Hours may pass until the first shard is whole: what is written of it counts.
            if self.selfgen.prompts:
                aim = min(aim, len(self.selfgen.prompts) * self.selfgen.max_new_tokens)
            written = min(self._num_queued + self._num_writing, aim)
            done = WRITING_SHARE * written + (1 - WRITING_SHARE) * total
        by_tokens = done / aim
        run.tell("collecting", COLLECTING_ENDS * min(1.0, max(by_time, by_tokens)))

    def _is_over(self, is_late: Callable[[], bool]) -> bool:
        # Generated text ends by itself, with what the last shard has.
        return not isinstance(self._run.spec.source, SelfGenerated) and is_late()

    def _too_little_text(self, split: Split, *, is_cut: bool) -> InvalidInput:
        cause = "the source gave too little text"
        if is_cut:
            # Perhaps nobody asked for that budget: it is the default.
            cause = (
                f"{self._run.plan.budget_s:.0f} seconds were too short a time budget for this model "
                "and source; give a larger one, or max_tokens"
            )
        return InvalidInput(
            f"{cause}: nothing is left for the {split} split", reason="TOO_LITTLE_TEXT"
        )

    def _take(self, split: Split, labelled: list[LabelledSequence]) -> None:
        if not labelled:
            return
        self.num_tokens[split] += sum(len(s.tokens) - s.first for s in labelled)
        if split != "heads":
            judged = sum(len(s.tokens) for s in self.judged[split])
            for sequence in labelled:
                if judged < MAX_JUDGED_TOKENS:
                    self.judged[split].append(sequence)
                    judged += len(sequence.tokens)
            return
        for sequence in labelled:
            self.builder.add(sequence.tokens, sequence.choices, sequence.first)
        choices = np.concatenate([s.choices[s.first :] for s in labelled])
        self._frequencies += torch.bincount(
            torch.from_numpy(choices), minlength=len(self._frequencies)
        )
