"""The risk split: greedy answers to prompts that no other split has.

A certified bound holds for prompts drawn like these: independently, each of a randomly chosen kind. So the split is not every tenth
sequence of the other text, in which one split may hold a passage and another a task about it: here each task brings its own passage.
If the caller gave the prompts, a share of them is held out (see `splits`).
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from calibrator_service.calibration.plan import COLLECTING_ENDS, RISK_PROMPTS, RISK_TEXT_ENDS
from calibrator_service.calibration.run import Run
from calibrator_service.calibration.spec import AnswerFile
from calibrator_service.calibration.text import seed_prompts
from calibrator_service.calibration.text.batch_decode import DecodeParams, decode_batch
from calibrator_service.calibration.text.chat import PromptFormat
from calibrator_service.calibration.text.self_generation import (
    FOLLOW_UP_SHARE,
    MIN_USER_CHARACTERS,
    START_TOKENS,
    USER_TURN_TOKENS,
    Lengths,
    SelfGenerationConfig,
)
from calibrator_service.calibration.text.shards import TokenSequence, read_shard, write_shard
from calibrator_service.calibration.text.stream import GivenText, Text
from shared.model.loaded import LoadedModel

# Tokens written per prompt of the risk split, in answers' lengths: some prompts are written as well.
ANSWERS_PER_PROMPT = 1.15
# The risk text may take this many times its planned time; then an incomplete round is dropped.
OVERTIME_FACTOR = 2.0
TEMPLATE, PASSAGE, MAGPIE = range(3)
# One passage prompt in this many asks for a passage; the others are about one.
PASSAGE_INTERVAL = 3
# Batches per round of drawing and answering.
ROUND_BATCHES = 2
# Prompts of up to this many tokens are padded to each other's length, whatever their ratio.
MIN_PADDED = 96

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class RiskAnswers:
    """The risk split: whole greedy answers of at most `max_new_tokens` tokens. `text`: what the other splits are made from."""

    text: Text
    sequences: tuple[TokenSequence, ...] = ()
    max_new_tokens: int = 0


@dataclass(frozen=True)
class Limits:
    """`seconds`: time to write answers; a round that is incomplete by then is dropped. `rows` are decoded together."""

    num_prompts: int
    rows: int
    seconds: float


def write_risk_answers(run: Run, text: Text, is_used: Callable[[Prompt], bool]) -> RiskAnswers:
    """The risk split of generated text; no answers for given text, which does not show what the model would say.

    `is_used` tells whether another split has a prompt. Raises `Cancelled`, and `Corrupt` for a file of an earlier run that cannot be
    read.
    """
    config = _config(run, text)
    if config is None:
        return RiskAnswers(text)
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
    """The number of prompts, which depends on the spec and on time and never on the answers.

    The answers have no more tokens than the spec asks for in the other splits together.
    """
    seconds = run.seconds_until(RISK_TEXT_ENDS)
    most = int(min(RISK_PROMPTS, max(run.plan.max_tokens / max_new_tokens, 1)))
    if seconds == float("inf"):
        return Limits(most, run.plan.rows, seconds)
    # A run that was killed may have found all its text on disk. Then the speed is unknown, and half a batch is assumed to fit.
    fitting = run.plan.rows // 2
    if written := run.figures.get("generated_tokens", 0.0):
        tokens_per_s = written / max(run.phase_s(), 1e-3)
        fitting = int(seconds * tokens_per_s / (ANSWERS_PER_PROMPT * max_new_tokens))
    return Limits(min(fitting, most), run.plan.rows, OVERTIME_FACTOR * seconds)


def batches_of_similar_length(prompts: Sequence[Prompt], rows: int) -> Iterator[list[Prompt]]:
    """Batches of at most `rows`, shortest prompts first. A prompt much longer than the batch's first starts a new batch."""
    batch: list[Prompt] = []
    for prompt in sorted(prompts, key=len):
        if batch and (len(batch) == rows or len(prompt) > max(2 * len(batch[0]), MIN_PADDED)):
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


class RiskAnswerGenerator:
    """Writes the risk split's answers, or rereads them from `folder`.

    `config.prompts`: the held-out prompts, () if prompts are drawn. `is_used` tells whether another split has a prompt.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: SelfGenerationConfig,
        folder: Path,
        is_used: Callable[[Prompt], bool],
    ) -> None:
        self._loaded = loaded
        self._config = config
        self._folder = folder
        self._is_used = is_used
        self._format = PromptFormat(loaded)
        self._lengths = Lengths.of(config, loaded)
        self._rng = random.Random(f"{config.seed}/risk")
        self._sampling = torch.Generator().manual_seed(self._rng.getrandbits(63))

    @property
    def max_new_tokens(self) -> int:
        """Longest answer; shorter than configured if the context is short."""
        return self._lengths.max_new_tokens

    def answers(
        self,
        limits: Limits,
        should_stop: Callable[[], bool],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[TokenSequence]:
        """Whole greedy answers, which loops do not end. Reread if `folder` has them. Raises `Cancelled`, `Corrupt`."""
        path = self._folder / "risk.safetensors"
        if not path.exists():
            write_shard(path, self._write(limits, should_stop, on_tokens))
        return read_shard(path)

    def _write(
        self,
        limits: Limits,
        should_stop: Callable[[], bool],
        on_tokens: Callable[[int], None] | None,
    ) -> list[TokenSequence]:
        end_s = time.monotonic() + limits.seconds
        answers: list[TokenSequence] = []
        num_left = limits.num_prompts
        given = list(self._config.prompts)

        def is_late() -> bool:
            return time.monotonic() >= end_s

        def decode(prompts: Sequence[Prompt], params: DecodeParams) -> list[list[int]]:
            return decode_batch(
                self._loaded,
                prompts,
                params,
                generator=self._sampling,
                should_stop=should_stop,
                is_late=is_late,
                on_tokens=on_tokens,
            )

        while num_left > 0 and not is_late():
            count = min(num_left, ROUND_BATCHES * limits.rows)
            num_left -= count
            if self._config.prompts:
                prompts = [tuple(self._format.encode_user(text)) for text in given[:count]]
                del given[:count]
            else:
                prompts = self._draw(count, decode)
            prompts = [prompt[-self._lengths.max_prompt :] for prompt in prompts]
            prompts = [prompt for prompt in prompts if not self._is_used(prompt)]
            whole: list[TokenSequence] = []
            for batch in batches_of_similar_length(prompts, limits.rows):
                whole += [
                    TokenSequence((*prompt, *new), len(prompt))
                    for prompt, new in zip(batch, decode(batch, self._greedy), strict=True)
                ]
                if is_late():
                    return answers
            answers += whole
        return answers

    @property
    def _greedy(self) -> DecodeParams:
        return DecodeParams(self.max_new_tokens, self._loaded.eos_token_ids, stop_loops=False)

    def _sampled(self, max_new_tokens: int) -> DecodeParams:
        config = self._config
        return replace(
            self._greedy,
            max_new_tokens=max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
        )

    def _draw(
        self, count: int, decode: Callable[[Sequence[Prompt], DecodeParams], list[list[int]]]
    ) -> list[Prompt]:
        rng, user_turn = self._rng, self._format.user_turn
        if not self._format.has_chat_template:
            starts = [(self._format.first_token(rng),) for _ in range(count)]
            sampled = decode(starts, self._sampled(START_TOKENS))
            return [(*start, *new) for start, new in zip(starts, sampled, strict=True)]
        kinds = [rng.randrange(3 if user_turn else 2) for _ in range(count)]
        texts = [seed_prompts.seed_prompt(rng) for _ in range(kinds.count(TEMPLATE))]
        prompts = [tuple(self._format.encode_user(text)) for text in texts]
        prompts += self._passage_prompts(kinds.count(PASSAGE), decode)
        if user_turn and MAGPIE in kinds:
            params = replace(self._sampled(USER_TURN_TOKENS), stop_ids=user_turn.stop_ids)
            turns = decode([user_turn.opening] * kinds.count(MAGPIE), params)
            texts = [t for t in map(self._format.decode, turns) if len(t) >= MIN_USER_CHARACTERS]
            prompts += [tuple(self._format.encode_user(text)) for text in texts]
        return prompts

    def _passage_prompts(
        self, count: int, decode: Callable[[Sequence[Prompt], DecodeParams], list[list[int]]]
    ) -> list[Prompt]:
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
        written = decode([request for _, request in continued], self._greedy) if continued else []
        for (text, _), new in zip(continued, written, strict=True):
            passage = self._format.decode(new)
            if rng.random() < FOLLOW_UP_SHARE:
                turns = [
                    ("user", text),
                    ("assistant", passage),
                    ("user", seed_prompts.follow_up(rng)),
                ]
            else:
                turns = [("user", seed_prompts.passage_task(rng, [passage]))]
            prompts.append(tuple(self._format.encode(turns)))
        return prompts


def _config(run: Run, text: Text) -> SelfGenerationConfig | None:
    """How the split is written: with a file of answers as for generated text without given prompts. None: it stays empty."""
    if isinstance(text, GivenText):
        if not isinstance(text.source, AnswerFile):
            return None
        return SelfGenerationConfig(
            seed=run.spec.seed, max_new_tokens=run.plan.max_new_tokens, rows=run.plan.rows
        )
    if text.config.prompts and not text.risk_prompts:
        return None
    return replace(text.config, prompts=text.risk_prompts)
