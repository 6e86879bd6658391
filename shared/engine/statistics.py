"""The engine's counts. Only its thread writes them, without locks.
Any thread may read them and may see a step partly counted."""

import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.engine.request.request import Exit, FinishReason, GenerationRequest, TokenChunk
from shared.engine.served import Pace, ServedCounts
from shared.errors import NeapError

QUEUE_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)
STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
# More versions than a worker keeps loaded, so that the counts of a version that is loaded again continue.
MAX_VERSIONS = 64
BATCH_BOUNDS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


class Distribution:
    """A histogram. `counts[i]` values were in (bounds[i - 1], bounds[i]]; the last count is of values above all bounds.
    `sum` is of all values. `bounds` ascend."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def record(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass(slots=True)
class CountedProgress(Pace):
    """What of a sequence has been counted already, or elsewhere, and under which version. `delivered_s`: time of its
    last tokens, in `time.monotonic()` seconds; 0 before the first. Its pace is that of what came after the first."""

    version: int | None = None
    num_generated: int = 0
    num_layer_executions: int = 0
    delivered_s: float = 0.0


class CountedAnswer(Protocol):
    """Its tokens, with those that the caller had before, and why it has ended, None before."""

    num_tokens: int
    end: tuple[FinishReason, str] | None


class CountedSequence(Protocol):
    """What the statistics read of a sequence; `counted` and `started_s` are theirs to set."""

    submitted_s: float
    started_s: float | None
    num_layer_executions: int
    num_cached: int
    num_drafted: int
    num_verify_passes: int
    failure: NeapError | None

    @property
    def counted(self) -> CountedProgress: ...
    @property
    def request(self) -> GenerationRequest: ...
    @property
    def answer(self) -> CountedAnswer: ...
    @property
    def is_finished(self) -> bool: ...


class DepthCounts:
    """Counts of depth execution over some requests, finished or not.

    A layer execution is one call of one decoder layer for one request while decoding, with any number of its tokens. A
    pass that several requests share counts for each of them. Decoding without drafts takes `num_layers` executions per
    token. If a step of a request takes fewer for the tokens that it gives, the difference is saved; if it takes more
    (because the verify pass rejected drafts of layer exits), the difference is extra: executions = num_layers * tokens
    - saved + extra. The first token of a request comes from the prompt's pass and is in none of these figures.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.num_requests = 0  # with at least one token
        self.num_generated_tokens = 0
        self.num_layer_executions = 0
        self.num_layer_executions_saved = 0
        self.num_layer_executions_extra = 0
        self.drafted: Counter[str] = Counter()  # proposer -> tokens
        self.accepted: Counter[str] = Counter()
        self.exits: Counter[str] = Counter()

    def add(self, counted: "StepCounts", exits: dict[Exit, int]) -> None:
        """Counts what the requests of one step got. `exits`: tokens of each."""
        self.num_requests += counted.num_requests
        self.num_generated_tokens += counted.num_tokens
        self.num_layer_executions += counted.num_executions
        saved = self._num_layers * counted.num_later_tokens - counted.num_executions
        self.num_layer_executions_saved += saved + counted.num_extra
        self.num_layer_executions_extra += counted.num_extra
        for each, number in exits.items():
            self.exits[each.proposer] += number


class StepCounts:
    """What the requests of one step and one version got: `num_later_tokens` without those of a request's first step;
    executions, and by how many of them requests exceeded full depth; and the tokens' exits."""

    __slots__ = ("exits", "num_executions", "num_extra", "num_later_tokens", "num_requests", "num_tokens")

    def __init__(self) -> None:
        self.num_requests = self.num_tokens = self.num_later_tokens = self.num_executions = self.num_extra = 0
        self.exits: list[Exit] = []


class EngineStatistics(DepthCounts):
    """Counts over all requests since the engine was created. `by_version` has them per router version, for the
    MAX_VERSIONS versions used last. Requests of `exact`
    without a router have version 0, those of `full` none."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.num_prompt_tokens = 0
        self.num_put_back = 0  # times that a running request was put back into the queue
        self.num_cached_prompt_tokens = 0
        self.by_version: OrderedDict[int, DepthCounts] = OrderedDict()
        self.served = ServedCounts(num_layers)
        self.queue_s = Distribution(QUEUE_BOUNDS_S)
        self.inter_token_s = Distribution(TOKEN_BOUNDS_S)
        self.step_s = Distribution(STEP_BOUNDS_S)
        self.step_sequences = Distribution(BATCH_BOUNDS)

    def record_drafts(self, numbers: Iterable[tuple[str, int, int]], version: int | None) -> None:
        """Counts drafts. `numbers`: for each proposer all of them, and those that became final."""
        drafting = [each for each in numbers if each[1]]
        for counts in self._counts(version) if drafting else ():
            for proposer, number, num_accepted in drafting:
                counts.drafted[proposer] += number
                counts.accepted[proposer] += num_accepted

    def _counts(self, version: int | None) -> tuple[DepthCounts, ...]:
        if version is None:
            return (self,)
        of_version = self.by_version.get(version)
        if of_version is None:
            of_version = self.by_version[version] = DepthCounts(self._num_layers)
            while len(self.by_version) > MAX_VERSIONS:
                self.by_version.popitem(last=False)
        self.by_version.move_to_end(version)
        return self, of_version

    def record_starts(self, sequences: Iterable[CountedSequence]) -> None:
        """Notes since when sequences run, and how long they have waited."""
        now = time.monotonic()
        for sequence in sequences:
            if sequence.started_s is None:
                sequence.started_s = now
                self.queue_s.record(max(now - sequence.submitted_s, 0.0))

    def record_step(
        self,
        seconds: float | None,
        results: Collection[tuple[CountedSequence, Sequence[TokenChunk]]],
        num_sequences: int | None = None,
    ) -> None:
        """Counts a step that took `seconds`; None: it was a part of one that is counted elsewhere. `results`: its
        sequences with the chunks that each of them got. `num_sequences`: those that shared the step, if they are
        more."""
        num_sequences = len(results) if num_sequences is None else num_sequences
        if seconds is not None:
            self.step_s.record(seconds)
            self.step_sequences.record(num_sequences)
        now = time.monotonic()
        of_versions: dict[int | None, StepCounts] = {}
        # Requests, by when they had tokens last, and how many they get.
        intervals: dict[float, dict[int, int]] = {}
        for sequence, chunks in results:
            seen, answer = sequence.counted, sequence.answer
            num_generated = answer.num_tokens
            num_tokens = num_generated - seen.num_generated
            if sequence.failure is not None:  # only what it was given before it failed
                num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
            if not num_tokens:  # a piece of a prompt
                continue
            executions = sequence.num_layer_executions
            num_executions = executions - seen.num_layer_executions
            delivered_s = seen.delivered_s
            seen.num_generated, seen.num_layer_executions, seen.delivered_s = num_generated, executions, now
            version = seen.version
            counted = of_versions.get(version)
            if counted is None:
                counted = of_versions[version] = StepCounts()
            counted.num_tokens += num_tokens
            for chunk in chunks:
                counted.exits += chunk.exits
            if delivered_s:
                times = intervals.get(delivered_s) or intervals.setdefault(delivered_s, {})
                times[num_tokens] = times.get(num_tokens, 0) + 1
                counted.num_later_tokens += num_tokens
                counted.num_executions += num_executions
                if (extra := num_executions - self._num_layers * num_tokens) > 0:
                    counted.num_extra += extra
                if version is not None:
                    seen.num_tokens += num_tokens
                    seen.num_steps += 1
                    seen.seconds += now - delivered_s if seconds is None else seconds
                    seen.num_running += num_sequences
                    if answer.end is not None and sequence.is_finished:
                        self._record_served(sequence, version, seen)
            else:
                counted.num_requests += 1
                self.num_prompt_tokens += len(sequence.request.given_ids)
                self.num_cached_prompt_tokens += sequence.num_cached
        for delivered_s, times in intervals.items():
            for num_tokens, number in times.items():
                self.inter_token_s.record((now - delivered_s) / num_tokens, num_tokens * number)
        for version, counted in of_versions.items():
            exits = Counter(counted.exits)
            for counts in self._counts(version):
                counts.add(counted, exits)

    def _record_served(self, sequence: CountedSequence, version: int, pace: Pace) -> None:
        request = sequence.request
        if request.policy.name == "exact" and sequence.failure is None:
            self.served.record(
                request.router_alias,
                version,
                pace,
                num_passes=sequence.num_verify_passes,
                num_drafted=sequence.num_drafted,
                num_executions=sequence.num_layer_executions,
            )
