"""The proposer that looks drafts up: in the sequence itself, in a table from calibration, and in one that learns from
answers.

Proposing what followed an earlier occurrence of the context is known as prompt lookup (LLMA, 2304.04487).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.ladder.learned_ngrams import ClientNgrams
from shared.ladder.ngram_table import MAX_ORDER
from shared.ladder.proposers import LEARNED, NGRAM_TABLE, PROMPT_LOOKUP, Draft, Match
from shared.ladder.table_confidence import bins_of, lookup_bins

if TYPE_CHECKING:
    from shared.ladder.ladder import Ladder


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


class TableProposer:
    """Prompt look-up, the n-gram table and the learned one, for one sequence. A `Proposer`.

    `learned` drafts with the confidence of the n-gram table.
    """

    def __init__(self, ladder: "Ladder", prompt: Sequence[int], learned: ClientNgrams | None = None) -> None:
        self._lookup_confidence = ladder.lookup_confidence
        self._ngram_confidence = ladder.ngram_confidence
        self._ngrams = ladder.ngrams if ladder.ngram_confidence else None
        self._index = PromptLookup(prompt) if self._lookup_confidence else None
        self._learned = learned if ladder.ngram_confidence else None
        self._tail = tuple(prompt[-MAX_ORDER:])

    def append(self, tokens: Sequence[int]) -> None:
        """Appends final tokens to the sequence."""
        self._tail = (*self._tail, *tokens)[-MAX_ORDER:]
        if self._index is not None:
            for token in tokens:
                self._index.append(token)

    def best(self, drafted: Sequence[int] = ()) -> Draft | None:
        """The most probable of what `propose` returns; None if it is empty."""
        return max(self.propose(drafted), key=lambda draft: draft.probability, default=None)

    def propose(self, drafted: Sequence[int] = ()) -> list[Draft]:
        """As `Proposer.propose`: from prompt look-up, the n-gram table, and the learned table."""
        lookup, ngrams = self.matches(drafted)
        drafts: list[Draft] = []
        num_chained = len(drafted)
        if lookup is not None and self._lookup_confidence is not None:
            bins = lookup_bins(lookup, ngrams, num_chained)
            drafts.append(Draft(lookup.token, self._lookup_confidence.probability(bins), PROMPT_LOOKUP, 0))
        if self._ngram_confidence is not None:
            learned = self._learned.matches((*self._tail, *drafted)[-MAX_ORDER:]) if self._learned is not None else []
            for proposer, matches in ((NGRAM_TABLE, ngrams), (LEARNED, learned)):
                for match in matches:
                    probability = self._ngram_confidence.probability(bins_of(match, lookup, num_chained))
                    drafts.append(Draft(match.token, probability, proposer, 0))
        return drafts

    def matches(self, drafted: Sequence[int]) -> tuple[Match | None, list[Match]]:
        """The matches of both tables without probabilities, for `propose` and for training their confidence: the
        look-up's, and the n-gram table's, the longest context first. The look-up's is the second opinion on each
        of these."""
        lookup = self._index.propose(drafted) if self._index is not None else None
        ngrams = self._ngrams.matches((*self._tail, *drafted)[-MAX_ORDER:]) if self._ngrams is not None else []
        return lookup, ngrams
