"""What drafting with one ladder knows: its costs, and how its drafts have fared."""

from collections.abc import Sequence

from shared.engine.drafting.pass_costs import PassCosts
from shared.engine.request.request import Exit, GenerationRequest
from shared.ladder.confidence import Confidence
from shared.ladder.joint_weights import DEFAULT_WEIGHTS
from shared.ladder.ladder import BoundLadder
from shared.ladder.learned_ngrams import ClientNgrams
from shared.ladder.proposers import NOT_CALIBRATED, numbered
from shared.ladder.tables import SequenceTables, native_ladder
from shared.model.runner import Runner
from shared.ops.drafting import Handle, functions

# The proposer of what the full model chooses itself.
FULL = "full"
# Weight of earlier calls and passes in what they take, and how much longer than measured they are taken to be at most.
DECAY, MOST_SLOWNESS = 0.95, 4.0
# Weight of earlier passes in what keys take, and how different passes must be to tell its two parts apart.
KEY_DECAY, LEAST_SPREAD = 0.99, 0.02
# What is learnt of sampled answers is kept apart for each tenth of a temperature up to this many tenths.
MOST_TENTHS = 20


class PassSeconds(dict[int, float]):
    """By number of tokens, each found when it is first asked for."""

    def __init__(self, native: Handle) -> None:
        super().__init__()
        self._native = native

    def __missing__(self, num_tokens: int) -> float:
        self[num_tokens] = seconds = functions().neap_ladder_pass_s(self._native.address, num_tokens)
        return float(seconds)


class Drafter:
    """Drafts with one bound ladder; without one, never. `costs` include those of the ladder's exits.

    `names` and `exits` are those of all proposers, by number, and then `exits` has the full model's; `are_calibrated`:
    whether the ladder's calibration has measured them.
    """

    def __init__(self, runner: Runner, costs: PassCosts, ladder: BoundLadder | None = None) -> None:
        self.costs = costs
        self.ladder = ladder
        self.runner = runner
        exit_depths = ladder.depths if ladder else ()
        self.names = numbered(ladder.names if ladder else ())
        depths = (*[0] * (len(self.names) - len(exit_depths)), *exit_depths, runner.num_layers)
        self.exits = (*map(Exit, depths, (*self.names, FULL)),)
        self.are_calibrated = [name not in NOT_CALIBRATED for name in self.names]
        self.native = native_ladder(
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
        # Measured seconds of a pass over so many tokens.
        self.pass_s = PassSeconds(self.native).__getitem__
        self._slowness = [1.0] * len(exit_depths)
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
        return make(self.native, confidence, learned, request.predicted, len(request.prompt_ids))

    def record_call(self, index: int, seconds: float, num_chains: int, num_drafts: int) -> None:
        """A call of an exit took so long, for that many chains and drafts of the longest. While serving it finds cold
        caches, and takes longer than it did when it was measured."""
        cost = self.costs.exits[index]
        measured_s = cost.alone_s + (num_chains - 1) * cost.each_more_s + (num_drafts - 1) * cost.each_draft_s
        found = min(max(seconds / max(measured_s, 1e-9), 1.0), MOST_SLOWNESS)
        self._slowness[index] = slowness = DECAY * self._slowness[index] + (1.0 - DECAY) * found
        functions().neap_ladder_slow_exit(self.native.address, index, slowness)


class KeyTime:
    """What passes take beyond their measured costs, because they attend to more keys than when they were measured:
    seconds per key of each sequence, and per key of each token. Fitted to the last passes by least squares."""

    def __init__(self) -> None:
        self._xx = self._xy = self._yy = self._xs = self._ys = 0.0
        self._of_sequences = self._of_tokens = 0.0

    def record(self, extra_s: float, parts: Sequence[tuple[int, int]]) -> None:
        """A pass took so much longer than measured. `parts`: cached keys and tokens of each sequence."""
        x = y = 0
        for keys, tokens in parts:
            x, y = x + keys, y + keys * tokens
        for name, new in (("_xx", x * x), ("_xy", x * y), ("_yy", y * y), ("_xs", x * extra_s), ("_ys", y * extra_s)):
            setattr(self, name, KEY_DECAY * getattr(self, name) + new)
        determinant = self._xx * self._yy - self._xy * self._xy
        first, second = 0.0, max(self._ys / self._yy, 0.0) if self._yy else 0.0
        # Where all passes had as many tokens, they tell nothing of a further one, and it takes what the others do.
        if determinant > LEAST_SPREAD * self._xx * self._yy:
            first = (self._xs * self._yy - self._ys * self._xy) / determinant
            second = (self._ys * self._xx - self._xs * self._xy) / determinant
            if first < 0.0:
                first, second = 0.0, max(self._ys / self._yy, 0.0)
            elif second < 0.0:
                first, second = max(self._xs / self._xx, 0.0), 0.0
        self._of_sequences, self._of_tokens = first, second

    def of(self, num_keys: Sequence[int]) -> tuple[float, list[float]]:
        """Seconds of a pass over a token of each of the sequences with so many cached keys, and of a further token."""
        return (self._of_sequences + self._of_tokens) * sum(num_keys), [self._of_tokens * keys for keys in num_keys]
