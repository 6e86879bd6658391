"""What drafting with one ladder knows: its costs, how its drafts have fared, and the host's time."""

from itertools import product

from shared.engine.drafting.confidence import Confidence
from shared.engine.drafting.planner import PassCosts
from shared.engine.request.request import GenerationRequest
from shared.ladder.joint_weights import DEFAULT_WEIGHTS
from shared.ladder.ladder import BoundLadder
from shared.model.runner import Runner

# Weight of earlier steps in the mean of the host's time, per step with drafts and per step without.
DECAY, REST_DECAY = 0.95, 0.99


class HostTime:
    """The mean time that the host takes for one place of a chain, without the time of exits. The device waits
    meanwhile, which matters where a pass takes a GPU a millisecond or two (decision 008)."""

    def __init__(self) -> None:
        self._seconds = self._places = 0.0
        self._has_begun = False

    @property
    def per_place_s(self) -> float:
        return self._seconds / self._places if self._places else 0.0

    def record(self, seconds: float, num_places: int) -> None:
        """A step took `seconds` for `num_places` places. The first such step does not count, because it reads tables
        from their files. Without any places the mean shrinks, so that drafting which was too slow to pay is tried
        again."""
        if num_places and not self._has_begun:
            self._has_begun = True
        elif num_places:
            self._seconds = DECAY * self._seconds + seconds
            self._places = DECAY * self._places + num_places
        else:
            self._seconds *= REST_DECAY


class Drafter:
    """Drafts with one bound ladder; without one, never. `costs` include those of the ladder's exits."""

    def __init__(self, runner: Runner, costs: PassCosts, ladder: BoundLadder | None = None) -> None:
        self.costs = costs
        self.ladder = ladder
        self.host_time = HostTime()
        self.runner = runner
        weights = ladder.joint_weights if ladder else DEFAULT_WEIGHTS
        # Sampled tokens agree with drafts less often than greedy ones, changed scores less often than the model's own,
        # and relaxed accepts more drafts: each kind has its own record.
        self._confidence = {kind: Confidence(weights) for kind in product((True, False), repeat=3)}

    def confidence(self, request: GenerationRequest) -> Confidence:
        """What earlier requests of this kind (greedy or sampled, with changed scores, relaxed or not) have
        shown of the ladder's drafts."""
        sampling, is_relaxed = request.sampling, request.policy.name == "relaxed"
        return self._confidence[sampling.is_greedy, sampling.changes_scores, is_relaxed]
