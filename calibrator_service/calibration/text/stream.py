"""The text of a calibration, in the order in which it is read or written: first the three splits, then the risk split.

`plan_text` decides what the text is made from. `split_sequences` yields the sequences of the splits heads, routers and report;
whoever reads them decides the pace, so text is written and passed through the model in turn, in bounded memory. `write_risk_answers`
follows, because it must know all prompts of the other splits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from calibrator_service.calibration.plan import COLLECTING_ENDS, RISK_PROMPTS, RISK_TEXT_ENDS
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.spec import HubDataset, SelfGenerated, TextFile
from calibrator_service.calibration.text.risk_answers import (
    Limits,
    RiskAnswerGenerator,
    hold_out_prompts,
)
from calibrator_service.calibration.text.self_generation import SelfGenerationConfig, SelfGenerator
from calibrator_service.calibration.text.shards import TokenSequence
from calibrator_service.calibration.text.sources import text_sequences
from calibrator_service.calibration.text.splits import Split, Splitter

# A model that only repeats itself would write for ever. After this many known sequences in a row the text ends.
MAX_STALE_SEQUENCES = 2000
# Share of the collecting phase's time after which no more text is begun.
TEXT_SHARE = 0.85
# Share of the work for a token of generated text that is done when it is written. The rest is one pass over many tokens at once.
WRITING_SHARE = 0.9
# Tokens written per prompt of the risk split, in answers' lengths: some prompts are written as well.
ANSWERS_PER_PROMPT = 1.15
# The risk text may take this many times its planned time; then an incomplete round is dropped.
OVERTIME_FACTOR = 2.0


@dataclass(frozen=True)
class GivenText:
    """A text file or dataset. The model chose none of it, so there is no risk split."""

    source: TextFile | HubDataset


@dataclass(frozen=True)
class GeneratedText:
    """Text that the model writes. `risk_prompts`: held out of the given prompts, () if prompts are drawn or too few were given."""

    config: SelfGenerationConfig
    risk_prompts: tuple[str, ...]


Text = GivenText | GeneratedText


@dataclass(frozen=True)
class RiskAnswers:
    """The risk split: whole greedy answers of at most `max_new_tokens` tokens. `text`: what the other splits are made from."""

    text: Text
    sequences: tuple[TokenSequence, ...] = ()
    max_new_tokens: int = 0


def plan_text(run: Run) -> Text:
    """What the text of this run is made from."""
    source = run.spec.source
    if not isinstance(source, SelfGenerated):
        return GivenText(source)
    config = SelfGenerationConfig(
        seed=run.spec.seed,
        prompts=source.prompts,
        max_new_tokens=run.plan.max_new_tokens,
        rows=run.plan.rows,
    )
    return GeneratedText(*hold_out_prompts(config))


class CollectingProgress:
    """Progress of the collecting phase, in tokens: those being written, those assigned to splits, and those learned from."""

    def __init__(self, run: Run, text: Text) -> None:
        self._run = run
        self._is_written = isinstance(text, GeneratedText)
        self._expected = run.plan.max_tokens
        if isinstance(text, GeneratedText) and text.config.prompts:
            most = len(text.config.prompts) * text.config.max_new_tokens
            self._expected = min(self._expected, most)
        self._num_being_written = self._num_learned = 0
        self.num_assigned = 0

    def is_late(self) -> bool:
        """Whether it is too late to begin more text."""
        budget_s = self._run.plan.budget_s
        return self._run.elapsed_s() > TEXT_SHARE * COLLECTING_ENDS * budget_s

    def written(self, num_tokens: int) -> None:
        """The model has written `num_tokens` more. Raises `Cancelled`."""
        figures = self._run.figures
        figures["generated_tokens"] = figures.get("generated_tokens", 0.0) + num_tokens
        self._num_being_written += num_tokens
        self._report()

    def shard_done(self) -> None:
        """The shard in work is complete; its tokens count again when they are assigned."""
        self._num_being_written = 0

    def learned(self, num_tokens: int) -> None:
        """`num_tokens` in total, over all splits, have gone through the model. Raises `Cancelled`."""
        self._num_learned = num_tokens
        self._report()

    def _report(self) -> None:
        run = self._run
        run.figures["tokens"] = float(self._num_learned)
        by_time = run.elapsed_s() / (COLLECTING_ENDS * run.plan.budget_s)
        done = float(self._num_learned)
        if self._is_written:
            # Hours may pass until the first shard is complete, so the part that is written counts.
            written = min(self.num_assigned + self._num_being_written, self._expected)
            done = WRITING_SHARE * written + (1 - WRITING_SHARE) * self._num_learned
        by_tokens = done / self._expected
        run.report("collecting", COLLECTING_ENDS * min(1.0, max(by_time, by_tokens)))


def split_sequences(
    run: Run, text: Text, splitter: Splitter, progress: CollectingProgress
) -> Iterator[tuple[Split, TokenSequence]]:
    """Yields new sequences with their splits until there are enough tokens, the phase's time is over, or nothing new comes.

    Raises what the source raises, and `Cancelled`.
    """
    num_stale = 0
    for sequence in _sequences(run, text, progress):
        split = splitter.assign(sequence)
        if split is None:
            num_stale += 1
        else:
            num_stale = 0
            progress.num_assigned += sequence.num_answer_tokens or len(sequence.tokens)
            yield split, sequence
        # Generated text ends by itself once it is late: what the last shard holds is used.
        is_over = isinstance(text, GivenText) and progress.is_late()
        is_stale = num_stale >= max(MAX_STALE_SEQUENCES, 2 * run.plan.rows)
        if progress.num_assigned >= run.plan.max_tokens or is_stale or is_over:
            return


def _sequences(run: Run, text: Text, progress: CollectingProgress) -> Iterator[TokenSequence]:
    if isinstance(text, GivenText):
        yield from text_sequences(run.loaded, text.source)
        return
    generator = SelfGenerator(run.loaded, text.config, run.text_folder)
    shards = generator.shards(
        should_stop=run.should_stop, is_late=progress.is_late, on_tokens=progress.written
    )
    for shard in shards:
        progress.shard_done()
        yield from shard


def write_risk_answers(
    run: Run, text: Text, is_used: Callable[[tuple[int, ...]], bool]
) -> RiskAnswers:
    """The risk split of generated text; no answers for given text, which does not show what the model would say.

    `is_used` tells whether another split has a prompt. Raises `Cancelled`, and `Corrupt` for a file of an earlier run that cannot be
    read.
    """
    if isinstance(text, GivenText) or (text.config.prompts and not text.risk_prompts):
        return RiskAnswers(text)
    config = replace(text.config, prompts=text.risk_prompts)
    generator = RiskAnswerGenerator(run.loaded, config, run.folder, is_used)
    limits = _risk_limits(run, generator.max_new_tokens)
    planned = max(ANSWERS_PER_PROMPT * generator.max_new_tokens * limits.num_prompts, 1.0)

    def on_tokens(num_tokens: int) -> None:
        written = run.figures.get("risk_tokens", 0.0) + num_tokens
        run.figures["risk_tokens"] = written
        span = RISK_TEXT_ENDS - COLLECTING_ENDS
        run.report("collecting", COLLECTING_ENDS + span * min(written / planned, 1.0))

    sequences = generator.answers(limits, run.should_stop, on_tokens)
    return RiskAnswers(text, tuple(sequences), generator.max_new_tokens)


def _risk_limits(run: Run, max_new_tokens: int) -> Limits:
    """The number of prompts, which depends on time alone and never on the answers."""
    seconds = run.seconds_until(RISK_TEXT_ENDS)
    if seconds == float("inf"):
        return Limits(RISK_PROMPTS, run.plan.rows, seconds)
    # A run that was killed may have found all its text on disk. Then the speed is unknown, and half a batch is assumed to fit.
    fitting = run.plan.rows // 2
    if written := run.figures.get("generated_tokens", 0.0):
        tokens_per_s = written / max(run.phase_s(), 1e-3)
        fitting = int(seconds * tokens_per_s / (ANSWERS_PER_PROMPT * max_new_tokens))
    return Limits(min(fitting, RISK_PROMPTS), run.plan.rows, OVERTIME_FACTOR * seconds)
