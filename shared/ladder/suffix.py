"""The suffix rung: drafts the token that followed an earlier occurrence of the current context in the same sequence.

The method is known as prompt lookup (LLMA, 2304.04487).
"""

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_MAX_MATCH = 8
# Occurrences remembered per context. Older ones predict little, and a sequence that loops would grow the list without bound.
MAX_OCCURRENCES = 16


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """The most frequent successor of the longest context that occurred before.

    `match_length`: tokens of that context, at most the index's `max_match`. `count`: how many of the remembered occurrences
    `token` followed. `share`: `count` / occurrences remembered.
    """

    token: int
    match_length: int
    count: int
    share: float


class SuffixIndex:
    """Maps every context of 1 to `max_match` tokens of one sequence to the tokens that followed it.

    Appending a token costs O(max_match).
    """

    __slots__ = ("_followers", "_max_match", "_tail")

    def __init__(self, tokens: Sequence[int] = (), *, max_match: int = DEFAULT_MAX_MATCH) -> None:
        if max_match < 1:
            raise ValueError(f"max_match is {max_match}; it must be at least 1")
        self._max_match = max_match
        # Most contexts occur once. These store a bare token; a list is made at the second occurrence.
        self._followers: dict[tuple[int, ...], int | list[int]] = {}
        self._tail: tuple[int, ...] = ()
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Appends a final token. Drafts are passed to `propose` instead."""
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
        """The token that most often followed the longest known suffix of the sequence + `drafted`.

        Of tokens with equal counts the latest wins. None if not even the last token occurred before.
        """
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
