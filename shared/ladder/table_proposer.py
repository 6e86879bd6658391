"""The proposer that looks drafts up: in the sequence itself, in a table from calibration, and in one that learns from answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.ladder.learned_successors import ClientSuccessors
from shared.ladder.rungs import LEARNED, SUCCESSOR, SUFFIX, Draft
from shared.ladder.successors import MAX_ORDER, SuccessorMatch
from shared.ladder.suffix import SuffixIndex, SuffixMatch
from shared.ladder.table_router import AGREES, DIFFERS, SILENT, Evidence

if TYPE_CHECKING:  # a ladder makes its proposers
    from shared.ladder.ladder import Ladder


class TableProposer:
    """The suffix, successor and learned rungs of one sequence. A `Proposer`.

    `learned` drafts with the probabilities of the successor rung's router.
    """

    def __init__(
        self, ladder: "Ladder", prompt: Sequence[int], learned: ClientSuccessors | None = None
    ) -> None:
        self._suffix_router = ladder.suffix_router
        self._successor_router = ladder.successor_router
        self._successors = ladder.successors if ladder.successor_router else None
        self._index = SuffixIndex(prompt) if self._suffix_router else None
        self._learned = learned if ladder.successor_router else None
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
        """As `Proposer.propose`: from suffix look-up, the successor table, and the learned table."""
        suffix, successors = self.matches(drafted)
        found: list[Draft] = []
        chained = len(drafted)
        if suffix is not None and self._suffix_router is not None:
            evidence = suffix_evidence(suffix, successors, chained)
            found.append(Draft(suffix.token, self._suffix_router.probability(evidence), SUFFIX, 0))
        if self._successor_router is not None:
            learned = (
                self._learned.matches(self._tail_with(drafted)) if self._learned is not None else []
            )
            for rung, matches in ((SUCCESSOR, successors), (LEARNED, learned)):
                for match in matches:
                    evidence = successor_evidence(match, suffix, chained)
                    probability = self._successor_router.probability(evidence)
                    found.append(Draft(match.token, probability, rung, 0))
        return found

    def matches(self, drafted: Sequence[int]) -> tuple[SuffixMatch | None, list[SuccessorMatch]]:
        """The matches of both rungs without probabilities, for `propose` and for training the routers."""
        suffix = self._index.propose(drafted) if self._index is not None else None
        if self._successors is None:
            return suffix, []
        return suffix, self._successors.matches(self._tail_with(drafted))

    def _tail_with(self, drafted: Sequence[int]) -> tuple[int, ...]:
        return (*self._tail, *drafted)[-MAX_ORDER:] if drafted else self._tail


def suffix_evidence(match: SuffixMatch, others: Sequence[SuccessorMatch], chained: int) -> Evidence:
    """The router's features of a suffix match. `other` compares it with the table's match of the longest context, `others[0]`."""
    other = SILENT if not others else AGREES if others[0].token == match.token else DIFFERS
    return Evidence(match.match_length, match.count, match.share, chained, other)


def successor_evidence(match: SuccessorMatch, other: SuffixMatch | None, chained: int) -> Evidence:
    """The router's features of a successor match, compared with the suffix match `other`."""
    verdict = SILENT if other is None else AGREES if other.token == match.token else DIFFERS
    return Evidence(match.order, match.count, match.share, chained, verdict)
