"""The text of a calibration: what it is made from, and its sequences with the splits they belong to.

Whoever reads the sequences decides the pace, so text is written and passed through the model in turn, in bounded
memory.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.plan import HEADS_SHARE
from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.spec import AnswerFile, HubDataset, SelfGenerated, ServedTraffic, TextFile
from calibrator_service.calibration.text.answers import answer_sequences, count_kinds
from calibrator_service.calibration.text.documents import text_sequences
from calibrator_service.calibration.text.self_generation import ROUND_TEMPERATURES, SelfGenerationConfig, SelfGenerator
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.text.splits import Split, Splitter, held_out_kinds
from calibrator_service.calibration.text.writer import Pace, Writer
from shared.errors import InvalidInput

# A model that only repeats itself would write for ever. After this many known sequences in a row the text ends.
MAX_STALE_SEQUENCES = 2000
# Share of the collecting phase's time after which no more text is begun.
TEXT_SHARE = 0.93
# The speed of writing is shown after this time: the first tokens come before there is a time to divide by.
MIN_RATE_S = 1.0
# Share of the work for a token of generated text that is done when it is written.
# The rest is one pass over many tokens at once.
WRITING_SHARE = 0.9
# Less generated text than this teaches nothing. Whether a budget pays for it is judged once EARLY_SHARE of the time to
# write has passed, with a slack, because rows that still read their prompts write later.
MIN_WRITTEN_TOKENS, EARLY_SHARE, EARLY_SLACK = 256, 0.25, 2.0
# The first tokens say nothing of the speed: most rows still read their prompts. As long as it is not known, the budget
# is judged at another share, and the next try is told to take a multiple of the time.
FIRST_TOKENS, UNKNOWN_SPEED_SHARE, UNKNOWN_SPEED_FACTOR = 32, 0.5, 4.0


@dataclass(frozen=True)
class GivenText:
    """A text file or dataset. Without answers the model chose none of it.

    `held_out_kinds`: kinds of prompts, in a file of answers, that only the report split has.
    """

    source: TextFile | AnswerFile | ServedTraffic | HubDataset
    held_out_kinds: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GeneratedText:
    """Text that the model writes."""

    config: SelfGenerationConfig


Text = GivenText | GeneratedText


def plan_text(run: CalibrationRun) -> Text:
    """What the text of this run is made from. Raises as the source does, if it must be read for that."""
    source = run.spec.source
    if isinstance(source, AnswerFile):
        return GivenText(source, held_out_kinds(count_kinds(source), run.spec.seed))
    if not isinstance(source, SelfGenerated):
        return GivenText(source)
    return GeneratedText(
        SelfGenerationConfig(seed=run.spec.seed, prompts=source.prompts, max_new_tokens=run.plan.max_new_tokens)
    )


class CollectingProgress:
    """Progress of the collecting phase, in tokens: those written, those assigned to splits, and those learned from."""

    def __init__(self, run: CalibrationRun, text: Text) -> None:
        self._run = run
        self._is_written = isinstance(text, GeneratedText)
        self._expected = run.plan.max_tokens
        if isinstance(text, GeneratedText) and text.config.prompts:
            num_answers = len(ROUND_TEMPERATURES) * len(text.config.prompts)
            most = num_answers * text.config.max_new_tokens
            self._expected = min(self._expected, most)
        self._num_written = self._num_learned = 0
        # Seconds of writing until it last paused, and when it began or went on (`time.monotonic`); None before the
        # writer is ready.
        self._written_s = 0.0
        self._since_s: float | None = None
        # When the first tokens had been written, in seconds of writing, and their number.
        self._first: tuple[float, int] | None = None
        self.num_assigned = 0

    @property
    def _text_s(self) -> float:
        return TEXT_SHARE * self._run.schedule.collecting * self._run.plan.budget_s

    def is_late(self) -> bool:
        """Whether it is too late to begin more text."""
        return self._run.elapsed_s() > self._text_s

    def add_written(self, num_tokens: int) -> None:
        """The model has written `num_tokens` more. Raises `Cancelled`, and `InvalidInput` (BUDGET_TOO_SHORT)."""
        self._since_s = self._since_s or time.monotonic()
        self._num_written += num_tokens
        seconds = max(self._written_s + time.monotonic() - self._since_s, 1e-3)
        if self._first is None and self._num_written >= FIRST_TOKENS:
            self._first = seconds, self._num_written
        figures = self._run.figures
        figures["generated_tokens"] = float(self._num_written)
        if seconds >= MIN_RATE_S:
            figures["tokens_per_s"] = self._num_written / seconds
        if self.is_late() or seconds >= EARLY_SHARE * self._text_s:
            self._judge(seconds)
        self._report()

    def pause(self) -> None:
        """What has been written goes through the model now."""
        self._written_s += time.monotonic() - (self._since_s or time.monotonic())

    def resume(self) -> None:
        """The model writes again."""
        self._since_s = self._since_s and time.monotonic()

    def _judge(self, seconds: float) -> None:
        """What the speed of writing, in `seconds` so far, says about the rest.
        Raises `InvalidInput` (BUDGET_TOO_SHORT)."""
        elapsed_s, written = self._run.elapsed_s(), max(self._num_written, self.num_assigned)
        left_s = max(self._text_s - elapsed_s, 0.0)
        first_s, num_first = self._first or (seconds, 0)
        rate = (self._num_written - num_first) / (seconds - first_s) if seconds - first_s >= MIN_RATE_S else None
        expected = written + (written / seconds if rate is None else rate) * left_s
        self._run.schedule.expect_positions(HEADS_SHARE * expected)
        slack = EARLY_SLACK if left_s else 1.0
        is_reading = rate is None and seconds < UNKNOWN_SPEED_SHARE * self._text_s
        if slack * expected >= MIN_WRITTEN_TOKENS or (left_s and is_reading):
            return
        needed_s = UNKNOWN_SPEED_FACTOR * elapsed_s
        if rate is not None:
            needed_s = elapsed_s + (2 * MIN_WRITTEN_TOKENS - written) / max(rate, 1 / elapsed_s)
        finding = f"it had written {written} tokens after {elapsed_s:.0f} seconds"
        raise _budget_too_short(self._run, finding, needed_s)

    def set_learned(self, num_tokens: int) -> None:
        """`num_tokens` in total, over all splits, have gone through the model. Raises `Cancelled`."""
        self._num_learned = num_tokens
        self._report()

    def _report(self) -> None:
        run = self._run
        run.figures["tokens"] = float(self._num_learned)
        end = run.schedule.collecting
        by_time = run.elapsed_s() / (end * run.plan.budget_s)
        done = float(self._num_learned)
        if self._is_written:
            # What a killed run has written is only assigned.
            written = min(max(self.num_assigned, self._num_written), self._expected)
            done = WRITING_SHARE * written + (1 - WRITING_SHARE) * self._num_learned
        by_tokens = done / self._expected
        run.report("collecting", end * min(1.0, max(by_time, by_tokens)))


def too_little_text(run: CalibrationRun, lacks: str, *, is_cut: bool) -> InvalidInput:
    """The error of a calibration whose text is not enough: BUDGET_TOO_SHORT if time cut it (`is_cut`), or else
    TOO_LITTLE_TEXT."""
    if is_cut:
        return _budget_too_short(run, lacks, 2 * min(run.elapsed_s(), run.schedule.collecting * run.plan.budget_s))
    return InvalidInput(f"the source gave too little text: {lacks}", reason="TOO_LITTLE_TEXT")


def _budget_too_short(run: CalibrationRun, finding: str, text_s: float) -> InvalidInput:
    """`text_s`: seconds that would do until the text is there."""
    needed_s = run.schedule.budget_for(text_s / TEXT_SHARE)
    # The caller may not have asked for that budget: it may be the default.
    return InvalidInput(
        f"{run.plan.budget_s:.0f} seconds were too short a time budget for this model on this machine: {finding}. Give "
        f"it about {math.ceil(needed_s)} seconds, or max_tokens",
        reason="BUDGET_TOO_SHORT",
        metadata={"needed_s": f"{math.ceil(needed_s)}"},
    )


def split_sequences(
    run: CalibrationRun, text: Text, splitter: Splitter, progress: CollectingProgress, writer: Writer
) -> Iterator[tuple[Split, TokenSequence]]:
    """Yields new sequences with their splits until there are enough tokens, the phase's time is over, or nothing new
    comes.

    A run that was killed since goes on with the same text, whatever time is left: its last chunk is in the sums as it
    was. Raises what the source raises, `Cancelled`, and `InvalidInput` (BUDGET_TOO_SHORT) if the time is too short to
    write any text.
    """
    num_stale = num_read = 0
    end = run.folder / "text.json"
    num_known = json.loads(end.read_text())["num_sequences"] if end.exists() else None
    for sequence in _sequences(run, text, progress, writer):
        num_read += 1
        split = splitter.assign(sequence)
        if split is None:
            num_stale += 1
        else:
            num_stale = 0
            progress.num_assigned += sequence.num_answer_tokens or len(sequence.tokens)
            yield split, sequence
        # Generated text ends by itself once it is late: what the last answers have is used.
        is_over = isinstance(text, GivenText) and progress.is_late()
        if num_known is not None:
            is_over = num_read >= num_known
        is_stale = num_stale >= max(MAX_STALE_SEQUENCES, 2 * run.plan.sizes.rows)
        if progress.num_assigned >= run.plan.max_tokens or is_stale or is_over:
            break
    write_atomically(end, json.dumps({"num_sequences": num_read}).encode())


def _sequences(
    run: CalibrationRun, text: Text, progress: CollectingProgress, writer: Writer
) -> Iterator[TokenSequence]:
    if isinstance(text, GivenText):
        if isinstance(text.source, AnswerFile | ServedTraffic):
            yield from answer_sequences(run.loaded, text.source)
        else:
            yield from text_sequences(run.loaded, text.source)
        return
    generator = SelfGenerator(run.loaded, text.config, run.text_folder)
    pace = Pace(run.should_stop, progress.is_late, progress.add_written)
    rest = run.folder / "rest.safetensors"
    for piece in generator.pieces(writer, pace, rest, rereads=run.has_collected):
        progress.pause()
        yield from piece
        progress.resume()
    if not run.has_collected:
        progress.add_written(0)
