"""The text of a calibration: what it is made from, and its sequences with the splits they belong to.

Whoever reads the sequences decides the pace, so text is written and passed through the model in turn, in bounded
memory.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.plan import HEADS_SHARE
from calibrator_service.calibration.ranks import least_loaded
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
        counts = run.ranks.firsts(count_kinds(source) if run.ranks.is_first else None)
        return GivenText(source, held_out_kinds(counts or {}, run.spec.seed))
    if not isinstance(source, SelfGenerated):
        return GivenText(source)
    return GeneratedText(
        SelfGenerationConfig(seed=run.spec.seed, prompts=source.prompts, max_new_tokens=run.plan.max_new_tokens)
    )


class CollectingProgress:
    """Progress of the collecting phase, in tokens: those written, those assigned to splits, and those learned from.
    Numbers are those of all ranks together: of the others what they told last (`by_others`)."""

    def __init__(self, run: CalibrationRun, text: Text) -> None:
        self._run = run
        self._is_written = isinstance(text, GeneratedText)
        self._expected = run.plan.max_tokens
        if isinstance(text, GeneratedText) and text.config.prompts:
            num_answers = len(ROUND_TEMPERATURES) * len(text.config.prompts)
            most = num_answers * text.config.max_new_tokens
            self._expected = min(self._expected, most)
        self.num_written = self.num_learned = 0
        self.by_others = (0, 0)
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
        self.num_written += num_tokens
        seconds = max(self._written_s + time.monotonic() - self._since_s, 1e-3)
        if self._first is None and self.num_written >= FIRST_TOKENS:
            self._first = seconds, self.num_written
        figures = self._run.figures
        num_written = self.num_written + self.by_others[0]
        figures["generated_tokens"] = float(num_written)
        if seconds >= MIN_RATE_S:
            figures["tokens_per_s"] = num_written / seconds
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
        # The other ranks are taken to be as fast.
        size = self._run.ranks.size
        elapsed_s, written = self._run.elapsed_s(), max(size * self.num_written, self.num_assigned)
        left_s = max(self._text_s - elapsed_s, 0.0)
        first_s, num_first = self._first or (seconds, 0)
        rate = None
        if seconds - first_s >= MIN_RATE_S:
            rate = size * (self.num_written - num_first) / (seconds - first_s)
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
        self.num_learned = num_tokens
        self._report()

    def _report(self) -> None:
        run = self._run
        num_learned = self.num_learned + self.by_others[1]
        run.figures["tokens"] = float(num_learned)
        end = run.schedule.collecting
        by_time = run.elapsed_s() / (end * run.plan.budget_s)
        done = float(num_learned)
        if self._is_written:
            # What a killed run has written is only assigned.
            written = min(max(self.num_assigned, self.num_written + self.by_others[0]), self._expected)
            done = WRITING_SHARE * written + (1 - WRITING_SHARE) * num_learned
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

    All ranks go through all sequences, in the order of one rank alone, and so agree on their splits. A rank yields its
    own. Those of the confidence and the report split are the first rank's, which learns from them and measures on them;
    an answer of the heads split is its writer's, which has its states; given text is dealt out evenly.

    A run that was killed since goes on with the same text, whatever time is left: its last chunk is in the sums as it
    was. Raises what the source raises, `Cancelled`, and `InvalidInput` (BUDGET_TOO_SHORT) if the time is too short to
    write any text.
    """
    num_stale = num_read = 0
    known = json.loads(run.text_end.read_text())["num_sequences"] if run.text_end.exists() else math.inf
    loads = [0] * run.ranks.size
    for author, sequence in _sequences(run, text, progress, writer, ends_late=known == math.inf):
        num_read += 1
        split = splitter.assign(sequence)
        if split is None:
            num_stale += 1
        else:
            num_stale = 0
            progress.num_assigned += sequence.num_answer_tokens or len(sequence.tokens)
            owner = 0
            if split == "heads":
                owner = least_loaded(loads) if author is None else author
            loads[owner] += len(sequence.tokens)
            if owner == run.ranks.rank:
                yield split, sequence
        is_stale = num_stale >= max(MAX_STALE_SEQUENCES, 2 * run.plan.sizes.rows)
        if progress.num_assigned >= run.plan.max_tokens or is_stale or num_read >= known:
            break
    write_atomically(run.text_end, json.dumps({"num_sequences": num_read}).encode())


def _sequences(
    run: CalibrationRun, text: Text, progress: CollectingProgress, writer: Writer, *, ends_late: bool
) -> Iterator[tuple[int | None, TokenSequence]]:
    """All sequences, with the rank that has written them; None for given text."""
    if isinstance(text, GivenText):
        for sequence in _given(run, text, progress, ends_late=ends_late):
            yield None, sequence
        return
    generator = SelfGenerator(run.loaded, text.config, run.text_folder, run.ranks)
    pace = Pace(run.should_stop, progress.is_late, progress.add_written)
    pieces = generator.pieces(writer, pace, run.text_rest, rereads=run.has_collected)
    while True:
        piece = next(pieces, None)
        shown = None if piece is None else [replace(sequence, states=None) for sequence in piece]
        told = run.ranks.everyones((shown, progress.num_written, progress.num_learned))
        others = [others for rank, others in enumerate(told) if rank != run.ranks.rank]
        progress.by_others = sum(written for _, written, _ in others), sum(learned for *_, learned in others)
        if all(theirs is None for theirs, *_ in told):
            break
        with writer.idle():
            progress.pause()
            for author, (theirs, *_) in enumerate(told):
                for sequence in (piece if author == run.ranks.rank else theirs) or ():
                    yield author, sequence
            progress.resume()
    if not run.has_collected:
        progress.add_written(0)


def _given(
    run: CalibrationRun, text: GivenText, progress: CollectingProgress, *, ends_late: bool
) -> Iterator[TokenSequence]:
    """The sequences of given text, until it is late if it `ends_late`. The first rank reads them."""
    if isinstance(text.source, AnswerFile | ServedTraffic):
        sequences = answer_sequences(run.loaded, text.source)
    else:
        sequences = text_sequences(run.loaded, text.source)
    while True:
        block: list[TokenSequence] = []
        if run.ranks.is_first:
            # As much as fills a chunk of each rank, so that all pass theirs through the model at the same time.
            num_wanted = run.plan.sizes.chunk_positions if run.ranks.size > 1 else 1
            while sum(len(sequence.tokens) for sequence in block) < run.ranks.size * num_wanted:
                if (sequence := next(sequences, None)) is None:
                    break
                block.append(sequence)
        block = run.ranks.firsts(block)
        yield from block
        if not block or run.ranks.firsts(ends_late and progress.is_late()):
            return
