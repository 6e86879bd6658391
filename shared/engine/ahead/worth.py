"""How many tokens the pass of a step should have, before anybody knows what will be drafted for it."""

from array import array
from collections.abc import Callable, Iterable, Sequence

from shared.ops.slots import record_worth

# Points of the curve: multiples of so many drafts of each request. And the weight of earlier steps.
STEP_DRAFTS, NUM_POINTS, DECAY = 0.25, 33, 0.9
# After so many steps without drafts they are tried again, because what is known of them is old.
MAX_WITHOUT = 64


class Worth:
    """What drafts have been worth in the last steps: the tokens that a request gains if the pass has so many drafts of
    each, the likeliest of all requests first."""

    def __init__(self) -> None:
        self._gains = array("d", bytes(8 * NUM_POINTS))
        self._weight = 0.0  # of all that is known
        self._num_without = 0

    def record(self, reaches: Iterable[float], num_rows: int) -> None:
        """What a step has drafted for `num_rows` requests: the probability of each draft that it and all before it are
        right. Zeros count for nothing."""
        record_worth(array("d", reaches), num_rows, STEP_DRAFTS, DECAY, self._gains)
        self._weight = DECAY * self._weight + 1.0

    def gain(self, num_drafts: float) -> float:
        """Tokens that a request gains by `num_drafts` of its own."""
        place = min(num_drafts / STEP_DRAFTS, NUM_POINTS - 1)
        low = int(place)
        high = min(low + 1, NUM_POINTS - 1)
        return (self._gains[low] + (self._gains[high] - self._gains[low]) * (place - low)) / self._weight

    def choose(
        self,
        sizes: Sequence[int],
        num_rows: int,
        num_drafting: int,
        num_others: int,
        most_logits: int,
        pass_s: Callable[[int], float],
        draft_s: float,
    ) -> tuple[int, bool]:
        """The size of a pass over `num_rows` requests and `num_others` tokens of prompts, and whether anything is
        drafted, for the `num_drafting` of them that may be: what gives most tokens per second. At most `most_logits`
        tokens of requests fit, and drafting takes `draft_s`. Nothing drafted is one of the choices."""
        least = num_rows + num_others
        smallest = next(size for size in sizes if size >= least)
        fitting = [size for size in sizes if smallest <= size <= most_logits + num_others]
        if not num_drafting or not fitting:
            return smallest, False
        if not self._weight or self._num_without >= MAX_WITHOUT:
            self._num_without = 0
            return next((size for size in fitting if size >= least + num_drafting), fitting[-1]), True
        best, rate = (smallest, False), num_rows / pass_s(smallest)
        for size in fitting:
            num_tokens = num_rows + num_drafting * self.gain((size - least) / num_drafting)
            if (found := num_tokens / (pass_s(size) + draft_s)) > rate:
                best, rate = (size, True), found
        self._num_without = 0 if best[1] else self._num_without + 1
        return best
