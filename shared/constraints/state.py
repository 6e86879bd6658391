"""Where an answer stands in its grammar."""

from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher
from torch import Tensor

from shared.errors import InvalidInput

# Of each token of the vocabulary, whether it may be chosen: [V].
Allowed = npt.NDArray[np.bool_]
WORD_BITS = 32
# How the library calls a state from which no text is complete.
DEAD_END = "NoExtensionBias"


class ConstraintState:
    """The grammar's state after the final tokens of one answer. Used by one thread at a time.

    `matcher` has consumed nothing, and is this state's own. A `path` is a sequence of drafts after the final tokens.
    The matcher is moved between paths by rollback, and what it says of a path is kept until a final token rules the
    path out: drafting and verification ask for the same ones.
    """

    def __init__(self, matcher: LLMatcher, vocabulary_size: int, eos_token_ids: Set[int]) -> None:
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = eos_token_ids
        self._has_ended = False
        # The drafts that the matcher has consumed.
        self._path: list[int] = []
        self._known: dict[tuple[int, ...], Allowed] = {}

    def push(self, token: int) -> None:
        """Adds a final token. Raises `InvalidInput` (reason CONSTRAINT_BROKEN) if the grammar does not allow it."""
        if not self.allowed()[token]:
            raise InvalidInput(
                f"token {token} is not what the constraint allows at its place",
                reason="CONSTRAINT_BROKEN",
            )
        self._has_ended |= token in self._eos_token_ids
        if not self._has_ended:
            if self._path[:1] != [token]:
                self._go_to([token])
            del self._path[0]
        self._known = {path[1:]: own for path, own in self._known.items() if path[:1] == (token,)}

    def has_ended(self, path: Sequence[int] = ()) -> bool:
        """Whether the final tokens and `path` have an end-of-sequence token. Nothing that follows it counts."""
        return self._has_ended or not self._eos_token_ids.isdisjoint(path)

    def allowed(self, path: Sequence[int] = ()) -> Allowed:
        """The tokens that may follow `path`, each of whose tokens must be allowed itself.

        All are where it has ended. Raises `InvalidInput` (reason
        CONSTRAINT_TOO_COMPLEX, or CONSTRAINT_INVALID where it leads to no end).
        """
        key = tuple(path)
        if key not in self._known:
            self._known[key] = self._computed(path)
        return self._known[key]

    def forced(self, path: Sequence[int] = ()) -> int | None:
        """The only token that may follow `path`; None if there is a choice."""
        allowed = self.allowed(path)
        return int(allowed.argmax()) if np.count_nonzero(allowed) == 1 else None

    def rows(self, path: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """The tokens that may follow `path` and the first i of `drafts`, in row i: [n + 1, V] bool, on the host."""
        whole = [*path, *drafts]
        ends = range(len(path), len(whole) + 1)
        return torch.from_numpy(np.stack([self.allowed(whole[:end]) for end in ends]))

    def _computed(self, path: Sequence[int]) -> Allowed:
        # The matcher itself does not consume such a token: it would not count in a rollback.
        if self.has_ended(path):
            return np.ones(self._vocabulary_size, np.bool_)
        self._go_to(path)
        words = np.zeros(-(-self._vocabulary_size // WORD_BITS), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        bits = np.unpackbits(words.view(np.uint8), count=self._vocabulary_size, bitorder="little")
        return bits.view(np.bool_)

    def _go_to(self, path: Sequence[int]) -> None:
        """Lets the matcher have consumed the drafts of `path`."""
        pairs = enumerate(zip(self._path, path, strict=False))
        shorter = min(len(self._path), len(path))
        same = next((place for place, (own, other) in pairs if own != other), shorter)
        self._matcher.rollback(len(self._path) - same)
        self._path = list(path)
        num_consumed = self._matcher.try_consume_tokens(self._path[same:])
        self._check()
        assert num_consumed == len(path) - same, "a draft that the constraint forbids"

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        if self._matcher.get_error().startswith(DEAD_END):
            raise InvalidInput(
                "no text that begins as the answer does fulfils the constraint",
                reason="CONSTRAINT_INVALID",
            )
        raise InvalidInput(
            "the answer has come to a place where the constraint takes too much work",
            reason="CONSTRAINT_TOO_COMPLEX",
        )
