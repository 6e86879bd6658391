"""How probable it is that a draft is right, given what all proposers say of its position. Native: see
csrc/draft/confidence.h."""

from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64

from shared.ladder.joint_weights import CASES, DEFAULT_WEIGHTS, JointWeights
from shared.ladder.proposers import Draft, numbered
from shared.ops.drafting import Handle, doubles, functions

# Tables alone are believed as they are.
TABLE_ALONE = "table"
_CASES = (*CASES, TABLE_ALONE)

# A draft, the case (of `JointWeights`, or TABLE_ALONE), the other kind of proposer's draft, and the probability.
Rated = tuple[Draft, str, Draft | None, float]


def joint_numbers(weights: JointWeights) -> list[float]:
    return [number for case in CASES for number in weights.of(case)]


class Confidence:
    """For one ladder and one kind of request. It learns from what was verified: from every draft of a position, chosen
    or not. `weights` and `exit_names`: the ladder's.
    """

    def __init__(self, weights: JointWeights = DEFAULT_WEIGHTS, exit_names: Sequence[str] = ()) -> None:
        self.handle = Handle("confidence", doubles(joint_numbers(weights)), c_int64(len(exit_names)))
        self._numbers = {name: number for number, name in enumerate(numbered(exit_names))}

    def rate(self, drafts: Sequence[Draft]) -> list[Rated]:
        """The drafts of a position that count, and the probability that each is right; the best first. Of one token the
        surest draft counts, and one that a table alone proposes only if no table is surer of another."""
        found = [(c_int32 * len(drafts))() for _ in range(3)]
        rated = (c_double * len(drafts))()
        count: int = functions().neap_confidence_rate(self.handle.address, *self._columns(drafts), *found, rated)
        return [
            (drafts[number], _CASES[case], drafts[other] if other >= 0 else None, probability)
            for number, case, other, probability in [*zip(*found, rated, strict=True)][:count]
        ]

    def factor(self, proposer: str) -> float:
        """By what the probabilities of an exit's confidence head have to be scaled, whatever the tables say."""
        factor: float = functions().neap_confidence_factor(self.handle.address, self._numbers[proposer])
        return factor

    def record(self, proposals: Sequence[Sequence[Draft]], tokens: Sequence[int]) -> None:
        """Records what a pass has shown: that `tokens` were the full model's choices at successive places, for which
        these drafts were proposed. The rest of the longer one does not count."""
        for drafts, token in zip(proposals, tokens, strict=False):
            functions().neap_confidence_record(self.handle.address, *self._columns(drafts), c_int32(token))

    def _columns(self, drafts: Sequence[Draft]) -> tuple[object, ...]:
        count = len(drafts)
        return (
            c_int64(count),
            (c_int32 * count)(*(draft.token for draft in drafts)),
            (c_int32 * count)(*(self._numbers[draft.proposer] for draft in drafts)),
            doubles(draft.probability for draft in drafts),
        )
