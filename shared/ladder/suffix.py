"""Rung 0a: what followed the last time this context occurred in this sequence (prompt lookup, LLMA 2304.04487)."""

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_MAX_MATCH = 8
# Occurrences remembered per context: what followed long ago says little, and a loop would grow without bound.
MAX_OCCURRENCES = 16


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """`token` followed `count` of the remembered occurrences of the longest context that occurred before.

    `match_length` tokens of context, at most the index' `max_match`; `share` = count / occurrences remembered.
    """

    token: int
    match_length: int
    count: int
    share: float


class SuffixIndex:
    """Every context of 1 to `max_match` tokens of one sequence, and what followed it. Appending costs O(max_match)."""

    __slots__ = ("_followers", "_max_match", "_tail")

    def __init__(self, tokens: Sequence[int] = (), *, max_match: int = DEFAULT_MAX_MATCH) -> None:
        if max_match < 1:
            raise ValueError(f"max_match is {max_match}; it must be at least 1")
        self._max_match = max_match
        # Most contexts occur once: a bare token then, a list from the second occurrence on.
        self._followers: dict[tuple[int, ...], int | list[int]] = {}
        self._tail: tuple[int, ...] = ()
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """The sequence is longer by `token`, for good: drafts never come here."""
        followers, tail = self._followers, self._tail
        for start in range(len(tail)):
            context = tail[start:]
            known = followers.get(context)
            if known is None:
                followers[context] = token
            elif isinstance(known, list):
                known.append(token)
                if len(known) > MAX_OCCURRENCES:
                    del known[0]
            else:
                followers[context] = [known, token]
        self._tail = (*tail, token)[-self._max_match :]

    def propose(self, drafted: Sequence[int] = ()) -> SuffixMatch | None:
        """What most often followed the longest known suffix of the sequence + `drafted`; the latest of equals."""
        tail = (*self._tail, *drafted)[-self._max_match :] if drafted else self._tail
        for start in range(len(tail)):
            known = self._followers.get(tail[start:])
            if known is None:
                continue
            length = len(tail) - start
            if not isinstance(known, list):
                return SuffixMatch(known, length, 1, 1.0)
            best, best_count = known[-1], known.count(known[-1])
            if best_count != len(known):
                for token in reversed(known):
                    count = known.count(token)
                    if count > best_count:
                        best, best_count = token, count
            return SuffixMatch(best, length, best_count, best_count / len(known))
        return None
