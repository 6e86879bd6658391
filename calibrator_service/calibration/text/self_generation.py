"""Text that the model writes itself, in pieces that a later run reuses.

A piece depends only on the model, the configuration and the piece's index, so a killed run continues with the first
missing piece. Training text must look like decoding, so answers are greedy. Prompts come from the caller, or from the
templates of `seed_prompts.json` and from the model: given only the opening of a user's turn, it writes what a user
would ask (Magpie, 2406.08464). A model without a chat template samples the first tokens of a text and continues
greedily. The caller's prompts may be few, so they are answered in several rounds: greedily in the first, and sampled in
later ones.

Some prompts need an answer first: a task about a passage, or a turn of Magpie. An *item* is one prompt with what leads
to it and what follows from it. Items are written side by side, so no item waits for another.
"""

import hashlib
import json
import random
import re
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from calibrator_service.calibration.ranks import Ranks
from calibrator_service.calibration.text.chat import PromptFormat
from calibrator_service.calibration.text.shards import TokenSequence, read_shard, write_shard
from calibrator_service.calibration.text.writer import Pace, Writer, WriteRequest, Written
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

# Items of one piece.
PIECE_ITEMS = 16
# Kinds of items, in turn. A passage makes three prompts: two follow from it.
TEMPLATE, PASSAGE, MAGPIE = range(3)
KINDS = (TEMPLATE, PASSAGE, MAGPIE, TEMPLATE, MAGPIE)
TASKS_PER_PASSAGE = 2
USER_TURN_TOKENS = 64
START_TOKENS = 12
MIN_USER_CHARACTERS = 8
FOLLOW_UP_SHARE = 0.25
# From about this many items on, templates of many more categories are used.
# Little text is better spent on the most common ones.
CORE_PROMPTS = 600
# Temperatures at which given prompts are answered, round by round.
ROUND_TEMPERATURES = (0.0, 0.7, 1.0, 0.4)
# The first GROWTH_ITEMS items have answers of at most FIRST_ANSWER_TOKENS tokens, the next ones twice as many, then
# three times, ..: a slow model has answers to many prompts before it has long ones. Only what pays for hundreds of
# answers gets to the full length.
FIRST_ANSWER_TOKENS, GROWTH_ITEMS = 24, 48

# Asks for one answer after the other.
Item = Generator[WriteRequest, Written, None]


@dataclass(frozen=True)
class SelfGenerationConfig:
    """Everything that decides the text, besides the model. `max_new_tokens` bounds an answer."""

    seed: int = 0
    prompts: tuple[str, ...] = ()
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 0.95

    def digest(self, model_fingerprint: str) -> str:
        """The name of the pieces: 12 hex digits over this configuration and the model."""
        identity = json.dumps({**asdict(self), "model": model_fingerprint, "format": 2})
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


@dataclass
class _Piece:
    """`by_item[i]`: the sequences of its item i so far. `num_open`: items that are not complete."""

    index: int
    by_item: list[list[TokenSequence]] = field(default_factory=list)
    num_open: int = 0
    is_new: bool = True

    @property
    def sequences(self) -> list[TokenSequence]:
        return [sequence for of_item in self.by_item for sequence in of_item]


class SelfGenerator:
    """Writes and rereads pieces in `folder`, those of its rank. Raises `InvalidInput` if prompts are given for a model
    without a tokenizer."""

    def __init__(
        self, loaded: LoadedModel, config: SelfGenerationConfig, folder: Path, ranks: Ranks | None = None
    ) -> None:
        if config.prompts and loaded.tokenizer is None:
            raise InvalidInput("prompts were given, but the model has no tokenizer")
        self._config = config
        self._folder, self._ranks = folder, ranks or Ranks()
        self._digest = config.digest(loaded.text_fingerprint)
        self._format = PromptFormat(loaded)
        self._lengths = Lengths.of(config, loaded)

    def path(self, index: int) -> Path:
        return self._folder / f"selfgen-{self._digest}-{index:05d}.safetensors"

    def pieces(self, writer: Writer, pace: Pace, rest: Path, *, rereads: bool = False) -> Iterator[list[TokenSequence]]:
        """Yields pieces in order of their index, read from disk or newly written; endless unless prompts are given.
        Meanwhile the writer goes on.

        Once late, what the unfinished pieces have is yielded as the last piece, and kept in `rest`: it is part of this
        run's text, but no other run may continue it. `rereads`: the pieces on disk are this run's text, however late it
        is. Raises what the writer raises, and `Corrupt` for a piece that cannot be read.
        """
        index = self._ranks.rank
        rereads = rereads or rest.exists()
        while self.path(index).exists() and (rereads or not pace.is_late()):
            yield read_shard(self.path(index))
            index += self._ranks.size
        if rest.exists():
            yield read_shard(rest)
        elif not pace.is_late():
            yield from self._written(index, writer, pace, rest)

    def _written(self, index: int, writer: Writer, pace: Pace, rest: Path) -> Iterator[list[TokenSequence]]:
        pieces: deque[_Piece] = deque()
        requests: deque[tuple[_Piece, Item, WriteRequest]] = deque()
        asked: dict[int, tuple[_Piece, Item]] = {}
        num_asked = 0

        def next_request() -> WriteRequest | None:
            nonlocal index, num_asked
            while not requests and self._has_items(index):
                pieces.append(self._begin(index, requests))
                index += self._ranks.size
            if not requests:
                return None
            piece, item, request = requests.popleft()
            asked[num_asked] = piece, item
            num_asked += 1
            return request

        for written in writer.write(next_request, pace):
            piece, item = asked.pop(written.index)
            try:
                requests.appendleft((piece, item, item.send(written)))
            except StopIteration:
                piece.num_open -= 1
            is_late = pace.is_late()
            while pieces and not pieces[0].num_open and not is_late:
                piece = pieces.popleft()
                if piece.is_new:
                    write_shard(self.path(piece.index), piece.sequences)
                yield piece.sequences
        last = [sequence for piece in pieces for sequence in piece.sequences]
        write_shard(rest, last)
        yield last

    def _has_items(self, index: int) -> bool:
        return not self._config.prompts or index * PIECE_ITEMS < self._num_given

    @property
    def _num_given(self) -> int:
        return len(ROUND_TEMPERATURES) * len(self._config.prompts)

    def _begin(self, index: int, requests: deque[tuple[_Piece, Item, WriteRequest]]) -> _Piece:
        """A piece, read from disk, or with the first requests of its items in `requests`."""
        if self.path(index).exists():
            return _Piece(index, [read_shard(self.path(index))], is_new=False)
        piece = _Piece(index)
        end = (index + 1) * PIECE_ITEMS
        for number in range(index * PIECE_ITEMS, min(end, self._num_given or end)):
            piece.by_item.append([])
            item = self._item(number, piece.by_item[-1])
            requests.append((piece, item, next(item)))
            piece.num_open += 1
        return piece

    def _item(self, number: int, sequences: list[TokenSequence]) -> Item:
        """Asks for what item `number` needs, and adds them to `sequences`."""
        rng = random.Random(f"{self._config.seed}/{number}")
        if self._config.prompts:
            turn, place = divmod(number, len(self._config.prompts))
            prompt = self._format.encode_user(self._config.prompts[place])
            longest = self._lengths.max_new_tokens
            yield from self._answer(sequences, rng, prompt, longest, ROUND_TEMPERATURES[turn])
            return
        longest = FIRST_ANSWER_TOKENS * (1 + number // GROWTH_ITEMS)
        longest = min(longest, self._lengths.max_new_tokens)
        if not self._format.has_chat_template:
            start = [self._format.first_token(rng)]
            start += yield from self._sample(rng, start, START_TOKENS)
            yield from self._answer(sequences, rng, start, longest)
            return
        kind, user_turn = KINDS[number % len(KINDS)], self._format.user_turn
        if kind == PASSAGE:
            yield from self._passage(sequences, rng, longest)
            return
        text = ""
        if kind == MAGPIE and user_turn:
            turn_ids = yield from self._sample(rng, list(user_turn.opening), USER_TURN_TOKENS, user_turn.stop_ids)
            text = self._format.decode(turn_ids)
        if len(text) < MIN_USER_CHARACTERS:  # no turn of Magpie, or one that asks nothing
            text = seed_prompt(rng, wide=number >= CORE_PROMPTS)
        yield from self._answer(sequences, rng, self._format.encode_user(text), longest)

    def _passage(self, sequences: list[TokenSequence], rng: random.Random, longest: int) -> Item:
        """A passage, then follow-up turns and tasks about it."""
        text = passage_prompt(rng)
        request = self._format.encode_user(text)
        passage = self._format.decode((yield from self._answer(sequences, rng, request, longest)))
        for _ in range(TASKS_PER_PASSAGE):
            turns = [("user", passage_task(rng, [passage]))]
            if rng.random() < FOLLOW_UP_SHARE:
                turns = [("user", text), ("assistant", passage), ("user", follow_up(rng))]
            yield from self._answer(sequences, rng, self._format.encode(turns), longest)

    def _answer(
        self,
        sequences: list[TokenSequence],
        rng: random.Random,
        prompt: list[int],
        longest: int,
        temperature: float = 0.0,
    ) -> Generator[WriteRequest, Written, tuple[int, ...]]:
        """The answer to a prompt, which becomes a sequence."""
        context = tuple(prompt[-self._lengths.max_prompt :])
        written = yield WriteRequest(
            context,
            longest,
            temperature=temperature,
            top_p=self._config.top_p,
            seed=rng.getrandbits(63),
            shows_states=True,
        )
        if written.tokens:
            sequences.append(
                TokenSequence(
                    (*context, *written.tokens),
                    len(context),
                    written.is_choice,
                    states=written.states,
                    states_start=written.states_start,
                )
            )
        return written.tokens

    def _sample(
        self, rng: random.Random, prompt: list[int], longest: int, stop_ids: frozenset[int] = frozenset()
    ) -> Generator[WriteRequest, Written, tuple[int, ...]]:
        """A part of a prompt, which the model writes."""
        written = yield WriteRequest(
            tuple(prompt[-self._lengths.max_prompt :]),
            min(longest, self._lengths.max_new_tokens),
            stop_ids,
            self._config.temperature,
            self._config.top_p,
            rng.getrandbits(63),
        )
        return written.tokens


# In a template. Values are filled in at random. No template is a prompt of a benchmark.
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Path(__file__).with_name("seed_prompts.json").read_text(encoding="utf-8"))
    return data


def seed_prompt(rng: random.Random, *, wide: bool = False) -> str:
    """One prompt. Every category (translation, QA, maths, writing, ...) is equally likely.
    `wide`: of many more categories."""
    prompts: dict[str, list[str]] = _data()["prompts"]
    if wide:
        prompts = prompts | _data()["wide_prompts"]
    return _fill(rng, rng.choice(prompts[rng.choice(list(prompts))]))


def passage_prompt(rng: random.Random) -> str:
    """A prompt that asks for a passage, which `passage_task` uses."""
    return _fill(rng, rng.choice(_data()["passages"]))


def passage_task(rng: random.Random, passages: list[str]) -> str:
    """A task (summarise, answer, translate, ...) about one of `passages`, which the model wrote."""
    tasks: dict[str, list[str]] = _data()["passage_tasks"]
    template = rng.choice(tasks[rng.choice(list(tasks))])
    return _fill(rng, template, passages)


def follow_up(rng: random.Random) -> str:
    """A second message that fits any answer."""
    return _fill(rng, rng.choice(_data()["follow_ups"]))


def _fill(rng: random.Random, template: str, passages: list[str] | None = None) -> str:
    values: dict[str, list[str]] = _data()["values"]

    def choose(match: re.Match[str]) -> str:
        options = passages if match[1] == "passage" and passages else values[match[1]]
        return rng.choice(options)

    return PLACEHOLDER.sub(choose, template)
