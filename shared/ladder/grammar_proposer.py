"""The proposer that drafts what a constraint forces."""

from collections.abc import Sequence

from shared.constraints.state import ConstraintState
from shared.ladder.rungs import GRAMMAR, Draft


class GrammarProposer:
    """Drafts the token that a constraint forces, with probability 1, and cuts what others propose. It has nothing to
    say where there is a choice.

    `state`: of the answer, which gets the final tokens. So this one, unlike a `Proposer`, has none to append.
    """

    def __init__(self, state: ConstraintState) -> None:
        self.state = state

    def propose(self, drafted: Sequence[int] = ()) -> list[Draft]:
        """As `Proposer.propose`."""
        token = self.state.forced(drafted)
        return [] if token is None else [Draft(token, 1.0, GRAMMAR, 0)]

    def cut(self, drafted: Sequence[int], drafts: Sequence[Draft]) -> list[Draft]:
        """Those of `drafts` after `drafted` that the constraint allows. None after the end."""
        if self.state.has_ended(drafted):
            return []
        return [draft for draft in drafts if self.state.allows(drafted, draft.token)]
