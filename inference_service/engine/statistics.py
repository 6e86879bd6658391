"""What the engine counts. Its thread alone writes, without locks; any thread may read, and may see a step half counted."""

import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, NamedTuple

from inference_service.engine.request.request import TokenChunk
from shared.ladder.rungs import Draft

if TYPE_CHECKING:
    from inference_service.engine.request.sequence import Sequence

QUEUE_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    5.0,
)
STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
# More than a worker keeps loaded; counts of a version that comes back go on.
MAX_VERSIONS = 64
BATCH_BOUNDS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


class Distribution:
    """How many values fell up to each of `bounds` (ascending, inclusive), and beyond the last; and their sum."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def record(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Progress(NamedTuple):
    """How far a sequence has been counted. `delivered_s` in `time.monotonic()` seconds."""

    num_generated: int = 0
    num_layer_executions: int = 0
    delivered_s: float = 0.0


class DepthCounts:
    """What depth execution did for some requests, whether they finished or not.

    Layer executions are those of decoding: one call of one decoder layer for a request, for however many of its tokens; a pass
    that several requests share counts for each of them. Plain decoding takes `num_layers` per token. What a request's step takes
    less than that for the tokens it brings is saved; what it takes more (drafts that a layer exit made and the deep pass
    rejected) is extra: executions = num_layers * tokens - saved + extra. The first token is the prompt's pass and in none of them.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.num_requests = 0  # that came to their first token
        self.num_generated_tokens = 0
        self.num_layer_executions = 0
        self.num_layer_executions_saved = 0
        self.num_layer_executions_extra = 0
        self.drafted: Counter[str] = Counter()  # rung -> tokens
        self.accepted: Counter[str] = Counter()
        self.exits: Counter[str] = Counter()

    def count_drafts(self, drafts: Rows[Draft], num_accepted: int) -> None:
        """Drafts of one chain, in order, of which the first `num_accepted` became final."""
        for index, draft in enumerate(drafts):
            self.drafted[draft.rung] += 1
            self.accepted[draft.rung] += index < num_accepted

    def count_tokens(self, num_tokens: int, chunks: Rows[TokenChunk]) -> None:
        """What one request got from one step."""
        self.num_generated_tokens += num_tokens
        for chunk in chunks:
            for token in chunk.tokens:
                self.exits[token.rung] += 1

    def count_layers(self, num_executions: int, num_tokens: int) -> None:
        """What a step that was not its first took for a request."""
        saved = self._num_layers * num_tokens - num_executions
        self.num_layer_executions += num_executions
        self.num_layer_executions_saved += max(saved, 0)
        self.num_layer_executions_extra += max(-saved, 0)


class EngineStatistics(DepthCounts):
    """Since the engine was made, over all requests; `by_version`: the same of each router version, for the last MAX_VERSIONS that
    were used. Requests without a router are version 0 and not among them."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0
        self.by_version: OrderedDict[int, DepthCounts] = OrderedDict()
        self.queue_s = Distribution(QUEUE_BOUNDS_S)
        self.inter_token_s = Distribution(TOKEN_BOUNDS_S)
        self.step_s = Distribution(STEP_BOUNDS_S)
        self.step_sequences = Distribution(BATCH_BOUNDS)

    def record_drafts(self, drafts: Rows[Draft], num_accepted: int, version: int = 0) -> None:
        """See `count_drafts`."""
        for counts in self._counts(version):
            counts.count_drafts(drafts, num_accepted)

    def _counts(self, version: int) -> tuple[DepthCounts, ...]:
        if not version:
            return (self,)
        own = self.by_version.get(version)
        if own is None:
            own = self.by_version[version] = DepthCounts(self._num_layers)
            while len(self.by_version) > MAX_VERSIONS:
                self.by_version.popitem(last=False)
        self.by_version.move_to_end(version)
        return self, own

    def record_step(
        self, seconds: float, sequences: Rows["Sequence"], results: Rows[Rows[TokenChunk]]
    ) -> None:
        """One step that took `seconds` for `sequences`, and what each of them got from it."""
        now = time.monotonic()
        self.step_s.record(seconds)
        self.step_sequences.record(len(sequences))
        for sequence, chunks in zip(sequences, results, strict=True):
            seen = sequence.counted
            num_tokens = sequence.num_generated - seen.num_generated
            if sequence.failure is not None:  # what it was handed before it failed
                num_tokens = sum(len(chunk.tokens) for chunk in chunks)
            if not num_tokens:  # a piece of a prompt
                continue
            num_executions = sequence.num_layer_executions - seen.num_layer_executions
            for counts in self._counts(sequence.request.router_version):
                counts.count_tokens(num_tokens, chunks)
                if seen.num_generated:
                    counts.count_layers(num_executions, num_tokens)
                else:
                    counts.num_requests += 1
            if seen.num_generated:
                self.inter_token_s.record((now - seen.delivered_s) / num_tokens, num_tokens)
            else:
                self.num_prompt_tokens += len(sequence.request.prompt_ids)
                self.num_cached_prompt_tokens += sequence.num_cached
            sequence.counted = Progress(sequence.num_generated, sequence.num_layer_executions, now)
