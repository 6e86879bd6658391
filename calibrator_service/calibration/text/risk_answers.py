"""The risk split: greedy answers to prompts that no other split has.

A certified bound holds for prompts drawn like these: independently, each of a randomly chosen kind. So the split is not every tenth
sequence of the other text, in which one split may hold a passage and another a task about it: here each task brings its own passage.
If the caller gave the prompts, a share of them is held out.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

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
from shared.model.load import LoadedModel

# One in HELD_OUT_INTERVAL given prompts is held out. Fewer than MIN_HELD_OUT certify nothing, so then none is.
HELD_OUT_INTERVAL, MIN_HELD_OUT = 5, 20
TEMPLATE, PASSAGE, MAGPIE = range(3)
# One passage prompt in this many asks for a passage; the others are about one.
PASSAGE_INTERVAL = 3
# Batches per round of drawing and answering.
ROUND_BATCHES = 2
# Prompts of up to this many tokens are padded to each other's length, whatever their ratio.
MIN_PADDED = 96

Prompt = tuple[int, ...]


def hold_out_prompts(
    config: SelfGenerationConfig,
) -> tuple[SelfGenerationConfig, tuple[str, ...]]:
    """(configuration of the other splits, given prompts held out for risk). A prompt that was given twice is on one side only."""
    distinct = sorted(set(config.prompts))
    random.Random(f"{config.seed}/apart").shuffle(distinct)
    held_out = distinct[: len(distinct) // HELD_OUT_INTERVAL]
    if len(held_out) < MIN_HELD_OUT:
        return config, ()
    kept = tuple(prompt for prompt in config.prompts if prompt not in set(held_out))
    return replace(config, prompts=kept), tuple(held_out)


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


@dataclass(frozen=True)
class Limits:
    """`seconds`: time to write answers; a round that is incomplete by then is dropped. `rows` are decoded together."""

    num_prompts: int
    rows: int
    seconds: float


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
