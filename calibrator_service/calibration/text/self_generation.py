"""Text that the model writes itself, in shards that a later run finds again.

A shard is a function of the model, the configuration and its index alone, so a killed run continues with the first one that is
missing. What is learnt for decoding must look like decoding: every answer is greedy. Prompts come from the caller, or from the
model (Magpie, 2406.08464: given nothing but the opening of a user's turn, it writes what a user would ask) and from
`seed_prompts`. A model without a chat template begins by itself at random and then continues greedily.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from calibrator_service.calibration.text import seed_prompts
from calibrator_service.calibration.text.batch_decode import DecodeParams, decode_batch
from calibrator_service.calibration.text.chat import (
    UserTurn,
    encode_chat,
    encode_text,
    has_chat_template,
    user_turn,
)
from calibrator_service.calibration.text.shards import TokenSequence, read_shard, write_shard
from shared.errors import InvalidInput
from shared.model.load import LoadedModel

# Shards alternate between seed prompts, passages (long prompts, kept apart so that batches need little padding) and Magpie.
NUM_KINDS, PASSAGES, MAGPIE = 3, 1, 2
USER_TURN_TOKENS = 64
START_TOKENS = 12
MIN_USER_CHARACTERS = 8
FOLLOW_UP_SHARE = 0.25


@dataclass(frozen=True)
class SelfgenConfig:
    """What decides the text. `rows` are decoded together; `max_new_tokens` bounds an answer."""

    seed: int = 0
    prompts: tuple[str, ...] = ()
    max_new_tokens: int = 128
    rows: int = 64
    temperature: float = 1.0
    top_p: float = 0.95

    def digest(self, model_fingerprint: str) -> str:
        """Names the shards: 12 hex digits over this configuration and the model."""
        identity = json.dumps({**asdict(self), "model": model_fingerprint, "format": 1})
        return hashlib.sha256(identity.encode()).hexdigest()[:12]


class SelfGenerator:
    """Writes and re-reads shards under `folder`. One at a time: it runs the model."""

    def __init__(self, loaded: LoadedModel, config: SelfgenConfig, folder: Path) -> None:
        self._loaded = loaded
        self._config = config
        self._folder = folder
        self._digest = config.digest(loaded.fingerprint)
        self._turn: UserTurn | None = None
        tokenizer = loaded.tokenizer
        self._is_chat = has_chat_template(tokenizer)
        if self._is_chat:
            assert tokenizer is not None
            self._turn = user_turn(tokenizer, loaded.eos_token_ids)
        if config.prompts and tokenizer is None:
            raise InvalidInput("prompts were given, but the model has no tokenizer")
        context = loaded.context_length
        self._max_new_tokens = min(config.max_new_tokens, max(1, context // 2))
        self._max_prompt = context - self._max_new_tokens

    def path(self, index: int) -> Path:
        return self._folder / f"selfgen-{self._digest}-{index:05d}.safetensors"

    def shards(
        self,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        is_late: Callable[[], bool] = lambda: False,
        on_tokens: Callable[[int], None] | None = None,
    ) -> Iterator[list[TokenSequence]]:
        """Shards from the first on: read where they exist, else written. Ends with the given prompts, or never.

        With `is_late` the shard at work ends early, is yielded, and is not kept: only whole shards may be found again.
        Raises `Cancelled` when `should_stop`, `Corrupt` for a shard that cannot be read.
        """
        index = 0
        while not self._is_exhausted(index) and not is_late():
            path = self.path(index)
            if path.exists():
                yield read_shard(path)
            else:
                sequences = self._generate(index, should_stop, is_late, on_tokens)
                if not is_late():
                    write_shard(path, sequences)
                yield sequences
            index += 1

    def _is_exhausted(self, index: int) -> bool:
        prompts = self._config.prompts
        return bool(prompts) and index * self._config.rows >= len(prompts)

    def _generate(
        self,
        index: int,
        should_stop: Callable[[], bool],
        is_late: Callable[[], bool],
        on_tokens: Callable[[int], None] | None,
    ) -> list[TokenSequence]:
        rng = random.Random(f"{self._config.seed}/{index}")
        generator = torch.Generator().manual_seed(rng.getrandbits(63))

        def decode(prompts: Sequence[Sequence[int]], sampled: int = 0) -> list[list[int]]:
            stops = self._turn.stop_ids if sampled and self._turn else self._loaded.eos_token_ids
            params = DecodeParams(
                max_new_tokens=min(sampled, self._max_new_tokens) or self._max_new_tokens,
                stop_ids=stops,
                temperature=self._config.temperature if sampled else 0.0,
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

        def answer(prompts: list[list[int]]) -> list[TokenSequence]:
            prompts = sorted((p[-self._max_prompt :] for p in prompts), key=len)
            return [
                TokenSequence((*prompt, *new), len(prompt))
                for prompt, new in zip(prompts, decode(prompts), strict=True)
                if new
            ]

        rows = self._config.rows
        if self._config.prompts:
            chosen = self._config.prompts[index * rows : (index + 1) * rows]
            return answer([self._encode([("user", text)]) for text in chosen])
        if not self._is_chat:
            starts = [[self._first_token(rng)] for _ in range(rows)]
            sampled = decode(starts, sampled=START_TOKENS)
            return answer([start + new for start, new in zip(starts, sampled, strict=True)])
        if index % NUM_KINDS == PASSAGES:
            return self._passages(rng, answer, is_late)
        if index % NUM_KINDS == MAGPIE and self._turn:
            turns = decode([self._turn.opening] * rows, sampled=USER_TURN_TOKENS)
            texts = [t for t in map(self._decode_text, turns) if len(t) >= MIN_USER_CHARACTERS]
        else:
            texts = [seed_prompts.seed_prompt(rng) for _ in range(rows)]
        return answer([self._encode([("user", text)]) for text in texts])

    def _passages(
        self,
        rng: random.Random,
        answer: Callable[[list[list[int]]], list[TokenSequence]],
        is_late: Callable[[], bool],
    ) -> list[TokenSequence]:
        """Passages, then tasks about them and second turns."""
        rows = self._config.rows
        asked: dict[tuple[int, ...], str] = {}
        for _ in range(rows // 2):  # a tokenizer that knows few of the words makes some alike
            text = seed_prompts.passage_prompt(rng)
            asked[tuple(self._encode([("user", text)]))] = text
        written = answer([list(prompt) for prompt in asked])
        if is_late():  # the prompts to come are long: a minute of prefill for a token each
            return written
        texts = [self._decode_text(s.tokens[s.answer_start :]) for s in written]
        num_second = int(FOLLOW_UP_SHARE * rows)
        second = [
            [("user", asked[written[i].tokens[: written[i].answer_start]]), ("assistant", texts[i])]
            for i in rng.sample(range(len(written)), min(num_second, len(written)))
        ]
        prompts = [
            self._encode([*turns, ("user", seed_prompts.follow_up(rng))]) for turns in second
        ]
        while len(prompts) < rows:
            task = seed_prompts.passage_task(rng, texts)
            prompts.append(self._encode([("user", task)]))
        return [*written, *answer(prompts)]

    def _first_token(self, rng: random.Random) -> int:
        tokenizer = self._loaded.tokenizer
        if tokenizer is not None and isinstance(tokenizer.bos_token_id, int):
            return tokenizer.bos_token_id
        return rng.randrange(self._loaded.vocabulary_size)

    def _encode(self, messages: list[tuple[str, str]]) -> list[int]:
        tokenizer = self._loaded.tokenizer
        assert tokenizer is not None
        if self._is_chat:
            return encode_chat(tokenizer, messages)
        return encode_text(tokenizer, messages[-1][1])

    def _decode_text(self, tokens: Sequence[int]) -> str:
        tokenizer = self._loaded.tokenizer
        assert tokenizer is not None
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str)
        return text.strip()
