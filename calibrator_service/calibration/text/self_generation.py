"""Text that the model writes itself, in shards that a later run reuses.

A shard depends only on the model, the configuration and the shard's index, so a killed run continues with the first missing shard.
Training text must look like decoding, so answers are greedy. Prompts come from the caller, or from the templates of `seed_prompts`
and from the model: given only the opening of a user's turn, it writes what a user would ask (Magpie, 2406.08464). A model without a
chat template samples the first tokens of a text and continues greedily. The caller's prompts may be few, so they are answered in
several rounds: greedily in the first, and sampled in later ones.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from calibrator_service.calibration.text import seed_prompts
from calibrator_service.calibration.text.batch_decode import DecodeParams, decode_batch
from calibrator_service.calibration.text.chat import PromptFormat
from calibrator_service.calibration.text.shards import TokenSequence, read_shard, write_shard
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

# Shards alternate between three kinds of prompts: templates, passages and Magpie. Passages make long prompts; in shards of their own
# they need little padding.
NUM_KINDS, PASSAGES, MAGPIE = 3, 1, 2
USER_TURN_TOKENS = 64
START_TOKENS = 12
MIN_USER_CHARACTERS = 8
FOLLOW_UP_SHARE = 0.25
# From about this many prompts on, templates of many more categories are used. Little text is better spent on the most common ones.
CORE_PROMPTS = 600
# Temperatures at which given prompts are answered, round by round.
ROUND_TEMPERATURES = (0.0, 0.7, 1.0, 0.4)


@dataclass(frozen=True)
class SelfGenerationConfig:
    """Everything that decides the text, besides the model. `rows` are decoded together; `max_new_tokens` bounds an answer."""

    seed: int = 0
    prompts: tuple[str, ...] = ()
    max_new_tokens: int = 128
    rows: int = 64
    temperature: float = 1.0
    top_p: float = 0.95

    def digest(self, model_fingerprint: str) -> str:
        """The name of the shards: 12 hex digits over this configuration and the model."""
        identity = json.dumps({**asdict(self), "model": model_fingerprint, "format": 1})
        return hashlib.sha256(identity.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Lengths:
    """Longest answer and longest prompt, in tokens. Half of a short context is left to the prompt."""

    max_new_tokens: int
    max_prompt: int

    @classmethod
    def of(cls, config: SelfGenerationConfig, loaded: LoadedModel) -> "Lengths":
        max_new_tokens = min(config.max_new_tokens, max(1, loaded.context_length // 2))
        return cls(max_new_tokens, loaded.context_length - max_new_tokens)


class SelfGenerator:
    """Writes and rereads shards in `folder`. It runs the model, so use one at a time.

    Raises `InvalidInput` if prompts are given for a model without a tokenizer.
    """

    def __init__(self, loaded: LoadedModel, config: SelfGenerationConfig, folder: Path) -> None:
        if config.prompts and loaded.tokenizer is None:
            raise InvalidInput("prompts were given, but the model has no tokenizer")
        self._loaded = loaded
        self._config = config
        self._folder = folder
        self._digest = config.digest(loaded.text_fingerprint)
        self._format = PromptFormat(loaded)
        self._lengths = Lengths.of(config, loaded)

    def path(self, index: int) -> Path:
        return self._folder / f"selfgen-{self._digest}-{index:05d}.safetensors"

    def shards(
        self,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        is_late: Callable[[], bool] = lambda: False,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[list[TokenSequence]]:
        """Yields shards in order of their index, read from disk or newly written; endless unless prompts are given.

        Once `is_late`, the shard in work ends early and is yielded, but not kept: only whole shards may be reused. Raises
        `Cancelled` once `should_stop`, `Corrupt` for a shard that cannot be read.
        """
        index = 0
        while not self._has_no_more_prompts(index) and not is_late():
            path = self.path(index)
            if path.exists():
                yield read_shard(path)
            else:
                sequences = self._generate(index, should_stop, is_late, on_tokens)
                if not is_late():
                    write_shard(path, sequences)
                yield sequences
            index += 1

    def _has_no_more_prompts(self, index: int) -> bool:
        return bool(self._config.prompts) and index >= self._shards_a_round * len(
            ROUND_TEMPERATURES
        )

    @property
    def _shards_a_round(self) -> int:
        return math.ceil(len(self._config.prompts) / self._config.rows)

    def _generate(
        self,
        index: int,
        should_stop: Callable[[], bool],
        is_late: Callable[[], bool],
        on_tokens: Callable[[int], None] | None,
    ) -> list[TokenSequence]:
        rng = random.Random(f"{self._config.seed}/{index}")
        generator = torch.Generator().manual_seed(rng.getrandbits(63))
        user_turn = self._format.user_turn

        def decode(
            prompts: Sequence[Sequence[int]], sampled: int = 0, temperature: float = 0.0
        ) -> list[list[int]]:
            """Answers at a temperature, or `sampled` tokens of a user's turn."""
            longest = self._lengths.max_new_tokens
            params = DecodeParams(
                max_new_tokens=min(sampled, longest) or longest,
                stop_ids=user_turn.stop_ids
                if sampled and user_turn
                else self._loaded.eos_token_ids,
                temperature=self._config.temperature if sampled else temperature,
                top_p=self._config.top_p,
            )
            return decode_batch(
                self._loaded,
                prompts,
                params,
                generator=generator,
                should_stop=should_stop,
                is_late=is_late,
                on_tokens=on_tokens,
            )

        def answer(prompts: list[list[int]], temperature: float = 0.0) -> list[TokenSequence]:
            prompts = sorted((p[-self._lengths.max_prompt :] for p in prompts), key=len)
            return [
                TokenSequence((*prompt, *new), len(prompt), is_greedy=temperature == 0.0)
                for prompt, new in zip(
                    prompts, decode(prompts, temperature=temperature), strict=True
                )
                if new
            ]

        rows = self._config.rows
        if self._config.prompts:
            turn, place = divmod(index, self._shards_a_round)
            chosen = self._config.prompts[place * rows : (place + 1) * rows]
            encoded = [self._format.encode_user(text) for text in chosen]
            return answer(encoded, ROUND_TEMPERATURES[turn])
        if not self._format.has_chat_template:
            starts = [[self._format.first_token(rng)] for _ in range(rows)]
            sampled = decode(starts, sampled=START_TOKENS)
            return answer([start + new for start, new in zip(starts, sampled, strict=True)])
        if index % NUM_KINDS == PASSAGES:
            return self._passages(rng, answer, is_late)
        if index % NUM_KINDS == MAGPIE and user_turn:
            turns = decode([user_turn.opening] * rows, sampled=USER_TURN_TOKENS)
            texts = [t for t in map(self._format.decode, turns) if len(t) >= MIN_USER_CHARACTERS]
        else:
            wide = index * rows >= CORE_PROMPTS
            texts = [seed_prompts.seed_prompt(rng, wide=wide) for _ in range(rows)]
        return answer([self._format.encode_user(text) for text in texts])

    def _passages(
        self,
        rng: random.Random,
        answer: Callable[[list[list[int]]], list[TokenSequence]],
        is_late: Callable[[], bool],
    ) -> list[TokenSequence]:
        """Passages, then follow-up turns and tasks about them."""
        rows = self._config.rows
        requests: dict[tuple[int, ...], str] = {}
        for _ in range(
            rows // 2
        ):  # two texts have the same tokens if the tokenizer knows few of the words
            text = seed_prompts.passage_prompt(rng)
            requests[tuple(self._format.encode_user(text))] = text
        written = answer([list(prompt) for prompt in requests])
        if is_late():  # the next prompts are long: a minute of prefill for one token each
            return written
        passages = [self._format.decode(s.tokens[s.answer_start :]) for s in written]
        num_follow_ups = min(int(FOLLOW_UP_SHARE * rows), len(written))
        conversations = [
            [("user", requests[written[i].prompt]), ("assistant", passages[i])]
            for i in rng.sample(range(len(written)), num_follow_ups)
        ]
        prompts = [
            self._format.encode([*turns, ("user", seed_prompts.follow_up(rng))])
            for turns in conversations
        ]
        while len(prompts) < rows:
            prompts.append(self._format.encode_user(seed_prompts.passage_task(rng, passages)))
        return [*written, *answer(prompts)]
