"""The proposer that looks drafts up: in the sequence itself, in a table from calibration, and in one that learns from
answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.ladder.learned_ngrams import ClientNgrams
from shared.ladder.ngram_table import MAX_ORDER
from shared.ladder.prompt_lookup import PromptLookup
from shared.ladder.rungs import LEARNED, NGRAM_TABLE, PROMPT_LOOKUP, Draft, Match
from shared.ladder.table_confidence import bins_of, lookup_bins

if TYPE_CHECKING:  # a ladder makes its proposers
    from shared.ladder.ladder import Ladder


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
            for rung, matches in ((NGRAM_TABLE, ngrams), (LEARNED, learned)):
                for match in matches:
                    probability = self._ngram_confidence.probability(bins_of(match, lookup, num_chained))
                    drafts.append(Draft(match.token, probability, rung, 0))
        return drafts

    def matches(self, drafted: Sequence[int]) -> tuple[Match | None, list[Match]]:
        """The matches of both tables without probabilities, for `propose` and for training their confidence: the
        look-up's, and the n-gram table's, the longest context first. The look-up's is the second opinion on each
        of these."""
        lookup = self._index.propose(drafted) if self._index is not None else None
        ngrams = self._ngrams.matches((*self._tail, *drafted)[-MAX_ORDER:]) if self._ngrams is not None else []
        return lookup, ngrams
