"""The lane of long prompts: one chunk of one prompt in a step, in a pass of its own before that of the requests."""

from collections.abc import Callable, Iterator
from functools import partial

from shared.engine.drafting.speculation import Speculation
from shared.engine.request.admission import PrefillRate
from shared.engine.request.sequence import DecodingSequence
from shared.model.paged_kv import as_paged
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import Work

# A chunk takes no longer. Two steps are under way at once, so a request that is cancelled holds the device up for twice
# as long.
CHUNK_S = 0.025


class PromptLane:
    """Chunks end at multiples of `size`, which is chosen once: the largest of the runner's whose pass takes no longer
    than CHUNK_S. So what shares a product with a token of a prompt follows from its position, not from its company.
    `size` 0: there is no lane, because the context is short or the device slow.

    Beside requests that decode, prompts have half of the time: a chunk comes once passes have taken as long.
    """

    def __init__(self, runner: PagedRunner) -> None:
        self._runner = runner
        self.size, self.chunk_s = 0, 0.0
        self._passed_s = 0.0  # since the last chunk, by measured costs

    def prepare(self, seconds: Callable[[Work], float], rate: PrefillRate) -> Iterator[None]:
        """Records the pass of a chunk. `seconds` tells what work takes, and `rate` learns it. Yields between parts."""
        for size in reversed(self._runner.lane_sizes):
            self._runner.read(size, (), None, 0)
            yield
            chunk_s = seconds(partial(self._runner.waited_read, size))
            yield
            if chunk_s <= CHUNK_S:
                self.size, self.chunk_s = size, chunk_s
                rate.record(size, chunk_s)
                return
            self._runner.drop_lane()

    def takes(self, sequence: DecodingSequence) -> bool:
        """Whether more of a prompt is left than a pass of requests holds, and nobody wants its states."""
        left = sequence.read_until - sequence.num_settled
        wants_states = sequence.scores_prompt or sequence.on_states is not None
        return self.size > 0 and left > self._runner.pass_sizes[-1] and not wants_states

    def is_open(self, num_decoding: int) -> bool:
        """Whether a chunk may come in a step in which so many requests decode."""
        return not num_decoding or self._passed_s >= self.chunk_s

    def cut(self, piece: Speculation) -> None:
        """Ends a piece of a prompt where a chunk ends, and before the prompt's last token, whose state is wanted."""
        end = min((piece.base // self.size + 1) * self.size, len(piece.sequence.tokens) - 1)
        for column in (piece.tokens, piece.reached, piece.states):
            del column[end - piece.base :]
        piece.num_logits = 0

    def read(self, piece: Speculation) -> None:
        """Launches a chunk."""
        self._runner.read(self.size, piece.tokens, as_paged(piece.sequence.cache), piece.base)
        self._passed_s = 0.0

    def passed(self, seconds: float) -> None:
        """A pass of requests takes so long."""
        self._passed_s = min(self._passed_s + seconds, self.chunk_s)
