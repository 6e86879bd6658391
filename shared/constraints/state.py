"""Where an answer stands in its grammar."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from time import perf_counter, thread_time
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from shared.errors import InvalidInput

# Whether each token of the vocabulary may be chosen: [V].
Allowed = npt.NDArray[np.bool_]
Known = TypeVar("Known")
P = ParamSpec("P")
T = TypeVar("T")
WORD_BITS = 32
# Forced tokens that are kept at once. A grammar may force text without end.
MAX_RUN = 64
# Bytes of forced text of which the first token is looked for.
MAX_BEGUN = 256
# What a grammar may take of the engine's thread, in seconds of a processor: at once, and for each token of the answer.
# Those that people write take a tenth of it. The library's limits bound what it takes at one token. Twice that at most,
# because the first of it is counted with waits for a processor, by a clock that costs less.
MOST_S, MOST_PER_TOKEN_S = 0.5, 0.005
# How the library calls a state from which no text is complete.
DEAD_END = "NoExtensionBias"


@dataclass
class Compiled:
    """A matcher that has consumed nothing. Its copies, one for each answer, share its lexer, which keeps what it has
    computed: in `spent_s` seconds of a processor. `has_failed`: a copy has come to a limit, perhaps the lexer's own."""

    matcher: LLMatcher
    spent_s: float = 0.0
    has_failed: bool = False


class ConstraintState:
    """The grammar's state after the final tokens of one answer. Used by one thread at a time.

    A `path` is a sequence of drafts after the final tokens. The matcher is moved between paths by rollback, and what it
    says of a path is kept until a final token rules the path out: drafting and verification ask for the same ones.
    Whether one token is allowed takes it microseconds, and a mask a hundred times as long.
    """

    def __init__(
        self, compiled: Compiled, tokenizer: LLTokenizer, vocabulary_size: int, eos_token_ids: Set[int]
    ) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids, self._ends = eos_token_ids, sorted(eos_token_ids)
        self._has_ended = False
        self._left_s, self._clock = MOST_S, perf_counter
        # The drafts that the matcher has consumed.
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], Allowed] = {}
        self._forced: dict[tuple[int, ...], int | None] = {}

    @property
    def warnings(self) -> list[str]:
        """What the library says of a grammar that it takes less strictly than it is written."""
        return list(self._matcher.get_grammar_warnings())

    def push(self, token: int) -> None:
        """Adds a final token. Raises `InvalidInput` (reason CONSTRAINT_BROKEN) if the grammar does not allow it."""
        if not self.allows((), token):
            self._mask(())  # of a token alone the library does not say that it has come to a limit
            raise InvalidInput(
                f"token {token} is not what the constraint allows at its place", reason="CONSTRAINT_BROKEN"
            )
        self._has_ended |= token in self._eos_token_ids
        self._left_s += MOST_PER_TOKEN_S
        if not self._has_ended:
            if self._path[:1] != [token]:
                self._go_to([token])
            del self._path[0]
        self._masks = _after(token, self._masks)
        self._forced = _after(token, self._forced)

    def has_ended(self, path: Sequence[int] = ()) -> bool:
        """Whether the final tokens and `path` have an end-of-sequence token. Nothing that follows it counts."""
        return self._has_ended or not self._eos_token_ids.isdisjoint(path)

    def allowed(self, path: Sequence[int] = ()) -> Allowed:
        """The tokens that may follow `path`, each of whose tokens must be allowed itself.

        All are where it has ended. Raises `InvalidInput` (reason
        CONSTRAINT_TOO_COMPLEX, or CONSTRAINT_INVALID where it leads to no end).
        """
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._mask(path)
        return self._masks[key]

    def forced(self, path: Sequence[int] = ()) -> int | None:
        """The only token that may follow `path`; None if there is a choice. Raises as `allowed` does."""
        key = tuple(path)
        if key not in self._forced:
            self._find_forced(key)
        return self._forced[key]

    def begun(self, path: Sequence[int] = ()) -> int | None:
        """The token that would begin the text that is forced after `path`, if nothing followed the text. None: no text
        is. It need not be the only one, because a token may go beyond the text, nor one that is allowed. Raises as
        `allowed` does."""
        if self.has_ended(path):
            return None
        self._go_to(path)
        text = self._ask(self._clock, self._matcher.compute_ff_bytes)[:MAX_BEGUN]
        return next(iter(self._tokenizer.tokenize_bytes(text)), None) if text else None

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether `token` may follow `path`: what `allowed` says of it. Raises as `allowed` does."""
        if self.has_ended(path):
            return True
        if (only := self.forced(path)) is not None:
            return token == only
        self._go_to(path)
        if token in self._eos_token_ids:
            return self._ask(self._clock, self._matcher.is_accepting)
        return self._ask(self._clock, self._matcher.validate_tokens, [token]) == 1

    def rows(self, drafts: Sequence[int]) -> "Rows":
        """The tokens that may follow the first i of `drafts`, in row i."""
        return Rows(self, drafts)

    def _find_forced(self, path: tuple[int, ...]) -> None:
        self._forced[path] = None
        if self.has_ended(path):
            return
        self._go_to(path)
        # Where text is forced, masks allow it as the tokenizer would write it. All that may follow the end of a text
        # that cannot go on is its token.
        text = self._ask(self._clock, self._matcher.compute_ff_tokens)[:MAX_RUN]
        forced = list(takewhile(lambda token: token not in self._eos_token_ids, text))
        if not forced and self._matcher.is_stopped() and self._matcher.is_accepting():
            forced = list(self._eos_token_ids) if len(self._eos_token_ids) == 1 else []
        for place, token in enumerate(forced):
            self._forced[*path, *forced[:place]] = token

    def _mask(self, path: Sequence[int]) -> Allowed:
        # The matcher itself does not consume such a token: it would not count in a rollback.
        if self.has_ended(path):
            return np.ones(self._vocabulary_size, np.bool_)
        if (only := self.forced(path)) is not None:
            alone = np.zeros(self._vocabulary_size, np.bool_)
            alone[only] = True
            return alone
        self._go_to(path)
        words = np.zeros(-(-self._vocabulary_size // WORD_BITS), np.uint32)
        self._ask(thread_time, self._matcher.unsafe_compute_mask_ptr, words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), count=self._vocabulary_size, bitorder="little")
        allowed = bits.view(np.bool_)
        # A token that ends texts is none of a text, although it may stand for a piece of one.
        allowed[self._ends] = self._matcher.is_accepting()
        if not allowed.any():
            raise _dead_end()
        return allowed

    def _go_to(self, path: Sequence[int]) -> None:
        """Lets the matcher have consumed the drafts of `path`."""
        if self._path == [*path]:
            return
        pairs = enumerate(zip(self._path, path, strict=False))
        shorter = min(len(self._path), len(path))
        same = next((place for place, (consumed, draft) in pairs if consumed != draft), shorter)
        self._matcher.rollback(len(self._path) - same)
        self._path = list(path)
        num_consumed = self._ask(self._clock, self._matcher.try_consume_tokens, self._path[same:])
        assert num_consumed == len(path) - same, "a draft that the constraint forbids"

    def _ask(self, clock: Callable[[], float], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What one of the matcher's functions returns. Raises `InvalidInput` if it has failed, or if the grammar has
        taken too much time.

        `clock`: of the thread for masks, after which it may wait for other threads; one that takes no longer than the
        function for the others, as long as it says that there is time left. Waits for a processor are none of the
        grammar's work: then it begins anew, by the thread's clock.
        """
        start_s = clock()
        answer = function(*args, **kwargs)
        spent_s = clock() - start_s
        self._left_s -= spent_s
        self._compiled.spent_s += spent_s
        if not self._matcher.is_error():
            if self._left_s < 0.0 and self._clock is perf_counter:
                self._left_s, self._clock = MOST_S, thread_time
            if self._left_s >= 0.0:
                return answer
        else:
            self._compiled.has_failed = True
        if self._matcher.get_error().startswith(DEAD_END):
            raise _dead_end()
        raise InvalidInput(
            "the answer has come to a place where the constraint takes too much work", reason="CONSTRAINT_TOO_COMPLEX"
        )


@dataclass(frozen=True)
class Rows:
    """`shared.model.sampling.AllowedTokens` of a chain: before row i stand its first i drafts."""

    state: ConstraintState
    drafts: Sequence[int]

    def forced(self, row: int) -> int | None:
        return self.state.forced(self.drafts[:row])

    def allows(self, row: int, token: int) -> bool:
        return self.state.allows(self.drafts[:row], token)

    def mask(self, row: int) -> Allowed:
        return self.state.allowed(self.drafts[:row])


def _dead_end() -> InvalidInput:
    return InvalidInput("no text that begins as the answer does fulfils the constraint", reason="CONSTRAINT_INVALID")


def _after(token: int, known: Mapping[tuple[int, ...], Known]) -> dict[tuple[int, ...], Known]:
    """What is known of the paths that begin with `token`, by what follows it."""
    return {path[1:]: entry for path, entry in known.items() if path[:1] == (token,)}
