"""What drafting with one ladder knows: its costs, and how its drafts have fared."""

from collections.abc import Sequence

from shared.engine.drafting.pass_costs import PassCosts
from shared.engine.request.request import GenerationRequest
from shared.ladder.confidence import Confidence
from shared.ladder.joint_weights import DEFAULT_WEIGHTS
from shared.ladder.ladder import BoundLadder
from shared.ladder.learned_ngrams import ClientNgrams
from shared.ladder.proposers import NOT_CALIBRATED, numbered
from shared.ladder.tables import SequenceTables, native_ladder
from shared.model.runner import Runner

# What is learnt of sampled answers is kept apart for each tenth of a temperature up to this many tenths.
MOST_TENTHS = 20


class Drafter:
    """Drafts with one bound ladder; without one, never. `costs` include those of the ladder's exits.

    `names` and `depths` are those of all proposers, by number; `are_calibrated`: whether the ladder's calibration has
    measured them.
    """

    def __init__(self, runner: Runner, costs: PassCosts, ladder: BoundLadder | None = None) -> None:
        self.costs = costs
        self.ladder = ladder
        self.runner = runner
        exit_depths = ladder.depths if ladder else ()
        self.names = numbered(ladder.names if ladder else ())
        self.depths = (0,) * (len(self.names) - len(exit_depths)) + exit_depths
        self.are_calibrated = [name not in NOT_CALIBRATED for name in self.names]
        self._native = native_ladder(
            ladder.ladder if ladder else None,
            runner.loaded.vocabulary_size,
            costs.verify,
            costs.wide,
            [
                (depth, agreement, cost.alone_s, cost.each_more_s, cost.each_draft_s, cost.num_drafts)
                for depth, agreement, cost in zip(exit_depths, ladder.agreements, costs.exits, strict=True)
            ]
            if ladder
            else (),
        )
        self._confidence: dict[tuple[int, bool, bool], Confidence] = {}

    def confidence(self, request: GenerationRequest) -> Confidence:
        """What earlier requests of this kind have shown of the ladder's drafts.

        Sampled tokens agree with drafts less often than greedy ones, and the less the higher the temperature; changed
        scores less often than the model's own; and relaxed accepts more drafts.
        """
        sampling = request.sampling
        tenths = 0 if sampling.is_greedy else min(max(round(10 * sampling.temperature), 1), MOST_TENTHS)
        kind = tenths, sampling.changes_scores, request.policy.name == "relaxed"
        if kind not in self._confidence:
            weights = self.ladder.joint_weights if self.ladder else DEFAULT_WEIGHTS
            self._confidence[kind] = Confidence(weights, self.ladder.names if self.ladder else ())
        return self._confidence[kind]

    def tables(self, request: GenerationRequest, learned: ClientNgrams | None) -> SequenceTables:
        """Those of a new sequence."""
        make = self.ladder.tables if self.ladder else SequenceTables
        confidence = self.confidence(request)
        return make(self._native, confidence, learned, request.predicted, len(request.prompt_ids))

    def calibrated(self, proposers: Sequence[int], probabilities: Sequence[float]) -> list[float]:
        """The probabilities of drafts, 0 of a proposer that no calibration has measured."""
        pairs = zip(proposers, probabilities, strict=True)
        return [probability if self.are_calibrated[number] else 0.0 for number, probability in pairs]
