"""Judges the version that an alias names while nothing is compared with it. Pure: no clock, no thread, no registry.

Two things can become of a version that was the best once. It may cost more than it saves, because the text changed or a
limit was set wrongly: full depth would be faster. Workers tell what full depth would have taken, by the costs of passes
that they have measured, of which a busy machine changes neither side. Or its drafts are accepted less often than they
were, because the traffic drifts. Its own past is the mean of the first blocks under the same load.

Both are tests for a change (`shared.sequential_test`), each worker's apart: an alarm needs two workers where two serve.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from calibrator_service.judge.trial import BLOCK_S
from shared.sequential_test import NUM_STAKES, after, log_evidence, read_logs
from shared.served import NOTHING, Served

# Without a change a worker gives an alarm once in so many blocks, at most.
BLOCKS_BETWEEN = 10_000
BOUND = 0.4
BLOCK_ANSWERS = 8
# Blocks that make a past.
PAST_BLOCKS = 20
# Changes of the logarithm of tokens per pass, and of that of the time of full depth over the version's.
LOST = math.log(1.15)
SLOWER = math.log(1.02)
MAX_GROUPS, MAX_OPEN = 64, 512


class Alarm(StrEnum):
    SLOWER_THAN_FULL = "slower_than_full"
    LOST_ACCEPTANCE = "lost_acceptance"


def _nothing() -> dict[str, list[float]]:
    return {alarm.value: [0.0] * NUM_STAKES for alarm in Alarm}


@dataclass
class Watch:
    """The watch over one version behind one alias. `past`: under each load the number of blocks and the sum of their
    logarithms of tokens per pass. `recent`: of the last blocks, for people."""

    version: int
    logs: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    past: dict[int, tuple[int, float]] = field(default_factory=dict)
    recent: Served = NOTHING
    # When each worker answered last.
    _seen_s: dict[str, float] = field(default_factory=dict)
    _open: dict[tuple[str, int], Served] = field(default_factory=dict)

    def observe(self, worker_id: str, load: int, served: Served, now_s: float) -> None:
        """Counts what a worker has newly served with the version under one load."""
        place = worker_id, load
        self._seen_s.pop(worker_id, None)
        while len(self._seen_s) >= MAX_GROUPS:
            self._seen_s.pop(next(iter(self._seen_s)))  # workers come and go
        self._seen_s[worker_id] = now_s
        block = self._open.pop(place, NOTHING).plus(served)
        if block.num_requests < BLOCK_ANSWERS:
            while len(self._open) >= MAX_OPEN:
                self._open.pop(next(iter(self._open)))
            self._open[place] = block
            return
        self.recent = Served._make(0.9 * old + new for old, new in zip(self.recent, block, strict=True))
        if worker_id not in self.logs and len(self.logs) >= MAX_GROUPS:
            self.logs.pop(next(iter(self.logs)))  # workers come and go; what is left of the oldest is least
        logs = self.logs.setdefault(worker_id, _nothing())
        if block.full_seconds > 0:
            lost = math.log(block.seconds / block.full_seconds) - SLOWER
            self._add(logs, Alarm.SLOWER_THAN_FULL, lost)
        pace = math.log(block.num_tokens / block.num_passes)
        count, total = self.past.get(load, (0, 0.0))
        if count < PAST_BLOCKS:
            self.past[load] = count + 1, total + pace
        else:
            self._add(logs, Alarm.LOST_ACCEPTANCE, total / count - LOST - pace)

    def _add(self, logs: dict[str, list[float]], alarm: Alarm, x: float) -> None:
        logs[alarm.value] = after(logs[alarm.value], x, BOUND, detects=True)

    def alarm(self, now_s: float) -> Alarm | None:
        """What has become of the version, if anything has. One worker says so alone where no other has answered for
        BLOCK_S."""
        num_serving = sum(now_s - seen_s <= BLOCK_S for seen_s in self._seen_s.values())
        for alarm in Alarm:
            found = [log_evidence(logs[alarm.value]) >= math.log(BLOCKS_BETWEEN) for logs in self.logs.values()]
            if sum(found) >= max(1, min(2, num_serving)):
                return alarm
        return None

    def begin_again(self) -> None:
        """Its present is its past from now on."""
        self.logs, self.past = {}, {}

    def figures(self) -> str:
        """A line for people."""
        if not self.recent.num_passes:
            return "no figures yet"
        line = f"{self.recent.num_tokens / self.recent.num_passes - 1:.2f} accepted drafts per pass"
        if self.past:
            paces = [total / count for count, total in self.past.values()]
            line += f", {math.exp(sum(paces) / len(paces)) - 1:.2f} when it began"
        if self.recent.full_seconds:
            line += f"; {self.recent.full_seconds / self.recent.seconds:.3f}x as fast as full depth would be"
        return line

    def to_record(self) -> dict[str, Any]:
        """What outlives this process: all but open blocks."""
        return {
            "version": self.version,
            "workers": list(self._seen_s),
            "logs": self.logs,
            "past": {str(load): list(past) for load, past in self.past.items()},
            "recent": list(self.recent),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], now_s: float) -> "Watch":
        """With all its workers as if they had just answered.

        Raises ValueError, KeyError or TypeError for what is no record of this build."""
        logs = {
            str(name): {alarm.value: read_logs(of_worker[alarm.value]) for alarm in Alarm}
            for name, of_worker in record["logs"].items()
        }
        past = {int(load): (int(count), float(total)) for load, (count, total) in record["past"].items()}
        seen_s = dict.fromkeys(map(str, record["workers"]), now_s)
        return cls(int(record["version"]), logs, past, Served._make(map(float, record["recent"])), seen_s)
