"""How many tokens the pass of a step should have, before anybody knows what will be drafted for it."""

from collections.abc import Callable, Sequence
from itertools import accumulate

# Points of the curve: multiples of so many drafts of each request. And the weight of earlier steps.
STEP_DRAFTS, NUM_POINTS, DECAY = 0.25, 33, 0.9
# After so many steps without drafts they are tried again, because what is known of them is old.
MAX_WITHOUT = 64


class Worth:
    """What drafts have been worth in the last steps: the tokens that a request gains if the pass has so many drafts of
    each, the likeliest of all requests first."""

    def __init__(self) -> None:
        self._gains = [0.0] * NUM_POINTS
        self._weight = 0.0  # of all that is known
        self._num_without = 0

    def record(self, reaches: Sequence[float], num_rows: int) -> None:
        """What a step has drafted for `num_rows` requests: the probability of each draft that it and all before it are
        right."""
        sums = [0.0, *accumulate(sorted(reaches, reverse=True))]
        found = []
        for point in range(NUM_POINTS):
            place = min(point * STEP_DRAFTS * num_rows, len(reaches))
            low = int(place)
            high = min(low + 1, len(reaches))
            found.append((sums[low] + (sums[high] - sums[low]) * (place - low)) / num_rows)
        self._gains = [DECAY * old + new for old, new in zip(self._gains, found, strict=True)]
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
            if num_tokens / (pass_s(size) + draft_s) > rate:
                best, rate = (size, True), num_tokens / (pass_s(size) + draft_s)
        self._num_without = 0 if best[1] else self._num_without + 1
        return best
