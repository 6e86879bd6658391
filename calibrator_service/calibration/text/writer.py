"""Who writes text: something that answers prompts, many at a time, in the order in which the answers end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# Sampling considers the most likely tokens only: sorting the whole vocabulary takes long.
NUCLEUS_CANDIDATES = 512
# An answer whose last LOOP_TAIL tokens repeat with a period of at most LOOP_PERIOD is in a loop, and more of it teaches
# nothing.
LOOP_TAIL, LOOP_PERIOD, LOOP_CHECK_INTERVAL = 48, 16, 8


@dataclass(frozen=True)
class WriteRequest:
    """A prompt to answer. An end-of-sequence token of the model ends the answer and is part of it; a token of
    `stop_ids` is not.

    `temperature` 0 is greedy; otherwise the answer depends on `seed`. `stop_loops`: a loop ends the answer, too.
    `shows_states`: the states of the answer are wanted, if the writer has them.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_loops: bool = True
    shows_states: bool = False


@dataclass(frozen=True)
class Written:
    """The answer to request number `index`, counted from 0.

    `is_choice`: each token is the greedy choice of the model that is calibrated, in its own arithmetic. `states` and
    `states_start`: as in `TokenSequence`, of a greedy answer.
    """

    index: int
    tokens: tuple[int, ...]
    is_choice: bool
    states: Tensor | None = None
    states_start: int = 0


@dataclass(frozen=True)
class Pace:
    """How long to write. Once `is_late`, answers end where they are.
    `on_tokens` gets how many tokens were written since its last call."""

    should_stop: Callable[[], bool] = lambda: False
    is_late: Callable[[], bool] = lambda: False
    on_tokens: Callable[[int], None] = lambda num_tokens: None


class Writer(Protocol):
    """Answers prompts. One call of `write` at a time."""

    def write(self, next_request: Callable[[], WriteRequest | None], pace: Pace) -> Iterator[Written]:
        """Yields answers as they end, until none is left. `next_request` is called whenever there is room for one more
        request. It returns None if there is none at the moment: the next answer may lead to one.

        Raises `Cancelled` once `pace.should_stop`. A caller that stops iterating ends all answers.
        """

    def idle(self) -> AbstractContextManager[None]:
        """Scope in which this process writes nothing, so that the model is free for other passes."""

    def close(self) -> None:
        """Frees what writing needs. Idempotent; a later `write` opens it again."""


def write_all(writer: Writer, requests: Sequence[WriteRequest], pace: Pace) -> list[Written]:
    """The answers to `requests`, in their order. Raises as `Writer.write`."""
    rest = iter(requests)
    by_index = {written.index: written for written in writer.write(lambda: next(rest, None), pace)}
    return [by_index[index] if index in by_index else Written(index, (), False) for index in range(len(requests))]


def is_repeating(tokens: Sequence[int]) -> bool:
    """Whether the last LOOP_TAIL tokens repeat with a short period."""
    if len(tokens) < LOOP_TAIL:
        return False
    tail = tokens[-LOOP_TAIL:]
    return any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1))


class WrittenAnswer:
    """The tokens of one answer so far. `is_over`: a loop has ended it, and later tokens are not taken."""

    def __init__(self, index: int, request: WriteRequest) -> None:
        self.index, self.request = index, request
        self.tokens: list[int] = []
        self.is_over = False

    def add(self, tokens: Sequence[int]) -> int:
        """Returns how many of `tokens` were taken."""
        before = len(self.tokens)
        for token in tokens:
            if self.is_over:
                break
            self.tokens.append(token)
            is_checked = self.request.stop_loops and len(self.tokens) % LOOP_CHECK_INTERVAL == 0
            self.is_over = is_checked and is_repeating(self.tokens)
        return len(self.tokens) - before
