"""The risk split: greedy answers to prompts that no other split has.

A certified bound holds for prompts drawn like these: independently, each of a randomly chosen kind. So the split is not
every tenth sequence of the other text, in which one split may hold a passage and another a task about it: here each
task brings its own passage. If the caller gave the prompts, a share of them is held out (see `splits`).
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calibrator_service.calibration.run import CalibrationRun
from calibrator_service.calibration.schedule import ANSWERS_PER_PROMPT
from calibrator_service.calibration.spec import AnswerFile
from calibrator_service.calibration.text import seed_prompts
from calibrator_service.calibration.text.chat import PromptFormat
from calibrator_service.calibration.text.self_generation import (
    FOLLOW_UP_SHARE,
    MAGPIE,
    MIN_USER_CHARACTERS,
    PASSAGE,
    START_TOKENS,
    TEMPLATE,
    USER_TURN_TOKENS,
    Lengths,
    SelfGenerationConfig,
)
from calibrator_service.calibration.text.shards import TokenSequence, read_shard, write_shard
from calibrator_service.calibration.text.stream import GivenText, Text, most_risk_prompts
from calibrator_service.calibration.text.writer import Pace, Writer, WriteRequest, write_all
from shared.model.loaded import LoadedModel

# The risk text may take this many times its planned time; then an incomplete round is dropped.
OVERTIME_FACTOR = 2.0
# One passage prompt in this many asks for a passage; the others are about one.
PASSAGE_INTERVAL = 3
# Rounds of drawing and answering have this many prompts for each row that is written.
ROUND_ROWS = 2

Prompt = tuple[int, ...]
# Answers requests, in their order.
Write = Callable[[Sequence[WriteRequest]], list[tuple[int, ...]]]


@dataclass(frozen=True)
class RiskAnswers:
    """The risk split: whole greedy answers of at most `max_new_tokens` tokens.
    `text`: what the other splits are made from."""

    text: Text
    sequences: tuple[TokenSequence, ...] = ()
    max_new_tokens: int = 0


@dataclass(frozen=True)
class Limits:
    """`seconds`: time to write answers; a round that is incomplete by then is dropped. `rows` are decoded together."""

    num_prompts: int
    rows: int
    seconds: float


def write_risk_answers(
    run: CalibrationRun, text: Text, is_used: Callable[[Prompt], bool], writer: Writer, *, knows_speed: bool = True
) -> RiskAnswers:
    """The risk split of generated text; no answers for given text, which does not show what the model would say, nor if
    there is no time.

    `is_used` tells whether another split has a prompt. `writer`: of the model itself, because a bound is certified for
    its own arithmetic. `knows_speed`: it has written the other text, too. Raises `Cancelled`, and `Corrupt` for a file
    of an earlier run that cannot be read.
    """
    config = _config(run, text)
    if config is None:
        return RiskAnswers(text)
    generator = RiskAnswerGenerator(run.loaded, config, run.folder, is_used)
    limits = _risk_limits(run, text, generator.max_new_tokens, knows_speed)
    planned = max(ANSWERS_PER_PROMPT * generator.max_new_tokens * limits.num_prompts, 1.0)

    def on_tokens(num_tokens: int) -> None:
        written = run.figures.get("risk_tokens", 0.0) + num_tokens
        run.figures["risk_tokens"] = written
        ends = run.schedule
        span = ends.risk_text - ends.collecting
        run.report("collecting", ends.collecting + span * min(written / planned, 1.0))

    sequences = generator.answers(limits, writer, Pace(run.should_stop, on_tokens=on_tokens))
    return RiskAnswers(text, tuple(sequences), generator.max_new_tokens)


def _risk_limits(run: CalibrationRun, text: Text, max_new_tokens: int, knows_speed: bool) -> Limits:
    """The number of prompts, which depends on the spec and on time and never on the answers."""
    seconds = run.seconds_until(run.schedule.risk_text)
    most = most_risk_prompts(run, text) if run.schedule.certifies else 0
    if seconds == float("inf"):
        return Limits(most, run.plan.sizes.rows, seconds)
    # A run that was killed may have found all its text on disk.
    # Then the speed is unknown, and half the rows are assumed to fit.
    fitting = run.plan.sizes.rows // 2
    if knows_speed and (tokens_per_s := run.figures.get("tokens_per_s", 0.0)):
        fitting = int(seconds * tokens_per_s / (ANSWERS_PER_PROMPT * max_new_tokens))
    return Limits(min(fitting, most), run.plan.sizes.rows, OVERTIME_FACTOR * seconds)


class RiskAnswerGenerator:
    """Writes the risk split's answers, or rereads them from `folder`.

    `config.prompts`: the held-out prompts, () if prompts are drawn. `is_used` tells whether another split has a prompt.
    """

    def __init__(
        self, loaded: LoadedModel, config: SelfGenerationConfig, folder: Path, is_used: Callable[[Prompt], bool]
    ) -> None:
        self._loaded = loaded
        self._config = config
        self._folder = folder
        self._is_used = is_used
        self._format = PromptFormat(loaded)
        self._lengths = Lengths.of(config, loaded)
        self._rng = random.Random(f"{config.seed}/risk")

    @property
    def max_new_tokens(self) -> int:
        """Longest answer; shorter than configured if the context is short."""
        return self._lengths.max_new_tokens

    def answers(self, limits: Limits, writer: Writer, pace: Pace) -> list[TokenSequence]:
        """Whole greedy answers, which loops do not end. Reread if `folder` has them.
        `pace` with the limits' time in place of its own.

        Raises `Cancelled`, `Corrupt`, and what the writer raises.
        """
        path = self._folder / "risk.safetensors"
        if not path.exists():
            end_s = time.monotonic() + limits.seconds
            pace = replace(pace, is_late=lambda: time.monotonic() >= end_s)
            write_shard(path, self._write(limits, writer, pace))
        return read_shard(path)

    def _write(self, limits: Limits, writer: Writer, pace: Pace) -> list[TokenSequence]:
        answers: list[TokenSequence] = []
        num_left = limits.num_prompts
        texts = list(self._config.prompts)

        def write(requests: Sequence[WriteRequest]) -> list[tuple[int, ...]]:
            return [written.tokens for written in write_all(writer, requests, pace)]

        while num_left > 0 and not pace.is_late():
            count = min(num_left, ROUND_ROWS * limits.rows)
            num_left -= count
            if self._config.prompts:
                prompts = [tuple(self._format.encode_user(text)) for text in texts[:count]]
                del texts[:count]
            else:
                prompts = self._draw(count, write)
            prompts = [prompt[-self._lengths.max_prompt :] for prompt in prompts]
            prompts = [prompt for prompt in prompts if not self._is_used(prompt)]
            whole = write([self._greedy(prompt) for prompt in prompts])
            if pace.is_late():
                return answers
            answers += [TokenSequence((*prompt, *new), len(prompt)) for prompt, new in zip(prompts, whole, strict=True)]
        return answers

    def _greedy(self, prompt: Prompt) -> WriteRequest:
        return WriteRequest(prompt, self.max_new_tokens, stop_loops=False)

    def _sampled(self, prompt: Prompt, max_new_tokens: int) -> WriteRequest:
        return replace(
            self._greedy(prompt),
            max_new_tokens=min(max_new_tokens, self.max_new_tokens),
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            seed=self._rng.getrandbits(63),
        )

    def _draw(self, count: int, write: Write) -> list[Prompt]:
        rng, user_turn = self._rng, self._format.user_turn
        if not self._format.has_chat_template:
            starts = [(self._format.first_token(rng),) for _ in range(count)]
            sampled = write([self._sampled(start, START_TOKENS) for start in starts])
            return [(*start, *new) for start, new in zip(starts, sampled, strict=True)]
        kinds = [rng.randrange(3 if user_turn else 2) for _ in range(count)]
        texts = [seed_prompts.seed_prompt(rng) for _ in range(kinds.count(TEMPLATE))]
        prompts = [tuple(self._format.encode_user(text)) for text in texts]
        prompts += self._passage_prompts(kinds.count(PASSAGE), write)
        if user_turn and MAGPIE in kinds:
            asked = [self._sampled(user_turn.opening, USER_TURN_TOKENS) for _ in range(kinds.count(MAGPIE))]
            turns = write([replace(request, stop_ids=user_turn.stop_ids) for request in asked])
            texts = [t for t in map(self._format.decode, turns) if len(t) >= MIN_USER_CHARACTERS]
            prompts += [tuple(self._format.encode_user(text)) for text in texts]
        return prompts

    def _passage_prompts(self, count: int, write: Write) -> list[Prompt]:
        """One in PASSAGE_INTERVAL asks for a passage, the others are about one, each about a passage of its own."""
        rng = self._rng
        texts = [seed_prompts.passage_prompt(rng) for _ in range(count)]
        requests = [tuple(self._format.encode_user(text)) for text in texts]
        asks_only = [rng.randrange(PASSAGE_INTERVAL) == 0 for _ in range(count)]
        prompts = [request for request, is_all in zip(requests, asks_only, strict=True) if is_all]
        # A passage that another split has is not new.
        continued = [
            (text, request)
            for text, request, is_all in zip(texts, requests, asks_only, strict=True)
            if not is_all and not self._is_used(request)
        ]
        written = write([self._greedy(request) for _, request in continued])
        for (text, _), new in zip(continued, written, strict=True):
            passage = self._format.decode(new)
            if rng.random() < FOLLOW_UP_SHARE:
                turns = [("user", text), ("assistant", passage), ("user", seed_prompts.follow_up(rng))]
            else:
                turns = [("user", seed_prompts.passage_task(rng, [passage]))]
            prompts.append(tuple(self._format.encode(turns)))
        return prompts


def _config(run: CalibrationRun, text: Text) -> SelfGenerationConfig | None:
    """How the split is written: with a file of answers as for generated text without given prompts.
    None: it stays empty."""
    if isinstance(text, GivenText):
        if not isinstance(text.source, AnswerFile):
            return None
        return SelfGenerationConfig(seed=run.spec.seed, max_new_tokens=run.plan.max_new_tokens)
    if text.config.prompts and not text.risk_prompts:
        return None
    return replace(text.config, prompts=text.risk_prompts)
