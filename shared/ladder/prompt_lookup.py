"""Prompt look-up (rung `suffix`): drafts what followed an earlier occurrence of the context in the same sequence.

The method is known as prompt lookup (LLMA, 2304.04487).
"""

from collections.abc import Sequence

from shared.ladder.rungs import Match

DEFAULT_MAX_MATCH = 8
# Occurrences remembered per context. Older ones predict little, and a sequence that loops would grow the list without
# bound.
MAX_OCCURRENCES = 16


class PromptLookup:
    """Maps every context of 1 to `max_match` tokens of one sequence to the tokens that followed it.

    Appending a token costs O(max_match). Most contexts of more than a few tokens occur once, so a context that has
    occurred once stands for all longer ones that end at its place. They get entries of their own when it occurs again.
    """

    __slots__ = ("_followers", "_max_match", "_tokens")

    def __init__(self, tokens: Sequence[int] = (), *, max_match: int = DEFAULT_MAX_MATCH) -> None:
        if max_match < 1:
            raise ValueError(f"max_match is {max_match}; it must be at least 1")
        self._max_match = max_match
        self._tokens: list[int] = []
        # The position of the token that followed, if the context has occurred once; else the tokens that followed, the
        # latest last.
        self._followers: dict[tuple[int, ...], int | list[int]] = {}
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Appends a final token. Drafts are passed to `propose` instead."""
        followers, tokens = self._followers, self._tokens
        tail = tuple(tokens[-self._max_match :])
        for start in range(len(tail) - 1, -1, -1):
            known = followers.setdefault(tail[start:], len(tokens))
            if isinstance(known, list):
                known.append(token)
                if len(known) > MAX_OCCURRENCES:
                    del known[0]
            elif known == len(tokens):  # the first occurrence
                break
            else:
                followers[tail[start:]] = [tokens[known], token]
                first = known - len(tail) + start - 1
                if start and first >= 0:
                    followers[tuple(tokens[first:known])] = known
        tokens.append(token)

    def propose(self, drafted: Sequence[int] = ()) -> Match | None:
        """The token that most often followed the longest known suffix of the sequence + `drafted`.

        Of tokens with equal counts the latest wins. None if not even the last token occurred before. Counts are of the
        remembered occurrences; the match's length is at most `max_match`.
        """
        tail = (*self._tokens[-self._max_match :], *drafted)[-self._max_match :]
        longest: list[int] = []
        length = 0
        for size in range(1, len(tail) + 1):
            known = self._followers.get(tail[-size:])
            if known is None:
                break
            if not isinstance(known, list):
                return Match(self._tokens[known], self._match_length(tail, known), 1, 1.0)
            longest, length = known, size
        if not longest:
            return None
        best, best_count = longest[-1], longest.count(longest[-1])
        if best_count != len(longest):
            for token in reversed(longest):
                count = longest.count(token)
                if count > best_count:
                    best, best_count = token, count
        return Match(best, length, best_count, best_count / len(longest))

    def _match_length(self, tail: tuple[int, ...], position: int) -> int:
        """How many of the last tokens of `tail` stand before `position`."""
        before = self._tokens[max(position - len(tail), 0) : position]
        pairs = zip(reversed(tail), reversed(before), strict=False)
        return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(tail), len(before)))
