"""The proposer that looks drafts up: in the sequence itself, in a table from calibration, and in one that learns from
answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.ladder.learned_ngrams import ClientNgrams
from shared.ladder.ngram_table import MAX_ORDER, NgramMatch
from shared.ladder.prompt_lookup import LookupMatch, PromptLookup
from shared.ladder.rungs import LEARNED, NGRAM_TABLE, PROMPT_LOOKUP, Draft
from shared.ladder.table_confidence import AGREES, DIFFERS, SILENT, Evidence

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
        chained = len(drafted)
        if lookup is not None and self._lookup_confidence is not None:
            evidence = lookup_evidence(lookup, ngrams, chained)
            drafts.append(Draft(lookup.token, self._lookup_confidence.probability(evidence), PROMPT_LOOKUP, 0))
        if self._ngram_confidence is not None:
            learned = self._learned.matches(self._tail_with(drafted)) if self._learned is not None else []
            for rung, matches in ((NGRAM_TABLE, ngrams), (LEARNED, learned)):
                for match in matches:
                    evidence = ngram_evidence(match, lookup, chained)
                    probability = self._ngram_confidence.probability(evidence)
                    drafts.append(Draft(match.token, probability, rung, 0))
        return drafts

    def matches(self, drafted: Sequence[int]) -> tuple[LookupMatch | None, list[NgramMatch]]:
        """The matches of both tables without probabilities, for `propose` and for training their confidence."""
        lookup = self._index.propose(drafted) if self._index is not None else None
        if self._ngrams is None:
            return lookup, []
        return lookup, self._ngrams.matches(self._tail_with(drafted))

    def _tail_with(self, drafted: Sequence[int]) -> tuple[int, ...]:
        return (*self._tail, *drafted)[-MAX_ORDER:] if drafted else self._tail


def lookup_evidence(match: LookupMatch, others: Sequence[NgramMatch], chained: int) -> Evidence:
    """The features of a look-up's match. The second opinion is the table's match of the longest context,
    `others[0]`."""
    second_opinion = SILENT if not others else AGREES if others[0].token == match.token else DIFFERS
    return Evidence(match.match_length, match.count, match.share, chained, second_opinion)


def ngram_evidence(match: NgramMatch, lookup: LookupMatch | None, chained: int) -> Evidence:
    """The features of an n-gram's match, whose second opinion is the look-up's."""
    second_opinion = SILENT if lookup is None else AGREES if lookup.token == match.token else DIFFERS
    return Evidence(match.order, match.count, match.share, chained, second_opinion)
