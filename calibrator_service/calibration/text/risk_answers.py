"""The risk split: answers to prompts drawn for it alone.

A bound speaks of prompts drawn as these are: independently, each of a kind that falls to it by chance, and seen by none of the other
splits. So they are not every tenth of what the others learn from, where a passage written in one split is asked about in another;
a task about a passage brings its own. Where the caller gave the prompts, a share of them is set apart.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from calibrator_service.calibration.text import seed_prompts
from calibrator_service.calibration.text.batch_decode import DecodeParams, decode_batch
from calibrator_service.calibration.text.self_generation import (
    FOLLOW_UP_SHARE,
    MIN_USER_CHARACTERS,
    START_TOKENS,
    USER_TURN_TOKENS,
    SelfgenConfig,
    SelfGenerator,
)
from calibrator_service.calibration.text.shards import TokenSequence, read_shard, write_shard
from shared.model.load import LoadedModel

# Of given prompts, every so manieth; fewer than LEAST_PROMPTS certify nothing, and all are learnt from.
GIVEN_SHARE, LEAST_PROMPTS = 5, 20
SEED, PASSAGE, MAGPIE = range(3)
# Batches per round of drawing and answering; prompts up to so many tokens pad each other.
ROUND_BATCHES, MIN_PADDED = 2, 96

Prompt = tuple[int, ...]


def set_apart(config: SelfgenConfig) -> tuple[SelfgenConfig, tuple[str, ...]]:
    """(what the other splits are made from, the given prompts that are left for risk). A prompt given twice is in one of them."""
    distinct = sorted(set(config.prompts))
    random.Random(f"{config.seed}/apart").shuffle(distinct)
    apart = distinct[: len(distinct) // GIVEN_SHARE]
    if len(apart) < LEAST_PROMPTS:
        return config, ()
    kept = tuple(prompt for prompt in config.prompts if prompt not in set(apart))
    return replace(config, prompts=kept), tuple(apart)


def alike(prompts: Sequence[Prompt], rows: int) -> Iterator[list[Prompt]]:
    """Batches of at most `rows`, the shortest first; a prompt much longer than a batch's first would pad all the others."""
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
    """`seconds` to write answers in; a round that is not whole by then is dropped, whatever it holds. `rows` are decoded together."""

    num_prompts: int
    rows: int
    seconds: float


class HeldOutGenerator(SelfGenerator):
    """`config.prompts` are those set apart, () where prompts are drawn; `has_dealt` knows the prompts of the other splits."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: SelfgenConfig,
        folder: Path,
        has_dealt: Callable[[Prompt], bool],
    ) -> None:
        super().__init__(loaded, config, folder)
        self._has_dealt = has_dealt
        self._at_random = {"temperature": config.temperature, "top_p": config.top_p}
        self._rng = random.Random(f"{config.seed}/risk")
        self._sampling = torch.Generator().manual_seed(self._rng.getrandbits(63))

    @property
    def max_new_tokens(self) -> int:
        """What an answer has at most: fewer than configured where the context is short."""
        return self._max_new_tokens

    def answers(
        self,
        limits: Limits,
        should_stop: Callable[[], bool],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[TokenSequence]:
        """Whole greedy answers, loops and all; those that are in `folder` already, where there are. Raises `Cancelled`."""
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
        found: list[TokenSequence] = []
        num_left = limits.num_prompts
        given = list(self._config.prompts)

        def is_late() -> bool:
            return time.monotonic() >= end_s

        def decode(prompts: Sequence[Prompt], **params: object) -> list[list[int]]:
            chosen = DecodeParams(
                self._max_new_tokens, self._loaded.eos_token_ids, stop_loops=False
            )
            return decode_batch(
                self._loaded,
                prompts,
                replace(chosen, **params),  # type: ignore[arg-type]
                generator=self._sampling,
                should_stop=should_stop,
                is_late=is_late,
                on_tokens=on_tokens,
            )

        while num_left > 0 and not is_late():
            count = min(num_left, ROUND_BATCHES * limits.rows)
            num_left -= count
            if self._config.prompts:
                prompts = [tuple(self._encode([("user", text)])) for text in given[:count]]
                del given[:count]
            else:
                prompts = self._draw(count, decode)
            prompts = [prompt[-self._max_prompt :] for prompt in prompts]
            prompts = [prompt for prompt in prompts if not self._has_dealt(prompt)]
            whole: list[TokenSequence] = []
            for batch in alike(prompts, limits.rows):
                whole += [
                    TokenSequence((*prompt, *new), len(prompt))
                    for prompt, new in zip(batch, decode(batch), strict=True)
                ]
                if is_late():
                    return found
            found += whole
        return found

    def _draw(self, count: int, decode: Callable[..., list[list[int]]]) -> list[Prompt]:
        rng = self._rng
        if not self._is_chat:
            starts = [[self._first_token(rng)] for _ in range(count)]
            sampled = decode(starts, max_new_tokens=START_TOKENS, **self._at_random)
            return [(*start, *new) for start, new in zip(starts, sampled, strict=True)]
        kinds = [rng.randrange(3 if self._turn else 2) for _ in range(count)]
        texts = [seed_prompts.seed_prompt(rng) for _ in range(kinds.count(SEED))]
        prompts = [tuple(self._encode([("user", text)])) for text in texts]
        prompts += self._about_passages(kinds.count(PASSAGE), decode)
        if self._turn and MAGPIE in kinds:
            turns = decode(
                [self._turn.opening] * kinds.count(MAGPIE),
                max_new_tokens=USER_TURN_TOKENS,
                stop_ids=self._turn.stop_ids,
                **self._at_random,
            )
            texts = [t for t in map(self._decode_text, turns) if len(t) >= MIN_USER_CHARACTERS]
            prompts += [tuple(self._encode([("user", text)])) for text in texts]
        return prompts

    def _about_passages(self, count: int, decode: Callable[..., list[list[int]]]) -> list[Prompt]:
        """As in `SelfGenerator`: of three, one asks for a passage and two are about one; but each about its own."""
        rng = self._rng
        asked = [seed_prompts.passage_prompt(rng) for _ in range(count)]
        opened = [tuple(self._encode([("user", text)])) for text in asked]
        only = [rng.randrange(3) == 0 for _ in range(count)]
        prompts = [prompt for prompt, is_all in zip(opened, only, strict=True) if is_all]
        # A passage that the other splits have read is no new one.
        about = [
            (text, prompt)
            for text, prompt, is_all in zip(asked, opened, only, strict=True)
            if not is_all and not self._has_dealt(prompt)
        ]
        written = decode([prompt for _, prompt in about]) if about else []
        for (text, _), new in zip(about, written, strict=True):
            passage = self._decode_text(new)
            if rng.random() < FOLLOW_UP_SHARE:
                turns = [
                    ("user", text),
                    ("assistant", passage),
                    ("user", seed_prompts.follow_up(rng)),
                ]
            else:
                turns = [("user", seed_prompts.passage_task(rng, [passage]))]
            prompts.append(tuple(self._encode(turns)))
        return prompts
