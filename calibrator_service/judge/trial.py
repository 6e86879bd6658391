"""Compares a canary with its alias' own version while both serve. Pure: no clock, no thread, no registry.

Requests are assigned by a keyed hash, so both versions have the same kind of requests at the same time. What differs
from worker to worker, from hour to hour and by the number of requests that run together would still hide a difference,
or feign one, because the canary's share grows. So only answers of one worker, under one load and of the same minutes
are compared: a *block* closes as soon as it has LEAST_ANSWERS of each version, and is one observation, the difference
of the mean logarithms of seconds per token, weighted by tokens. Four sequential tests observe it
(`shared.sequential_test`): that the canary is faster, that it is slower, and the two that together show that the
versions are less than SAME apart.

A single worker never decides where others serve, however much it says: a test holds only if it holds without each of
them, too, and so of two workers by what each has found alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from shared.sequential_test import NUM_STAKES, after, joined, log_evidence, read_logs
from shared.served import NOTHING, Served

# The probability that a canary which is as fast is ever found to be faster, and that it is found to be slower.
ALPHA = 0.01
# A block counts as at most this difference of logarithms: 65 %.
BOUND = 0.5
LEAST_ANSWERS = 8
# After so long a block closes with what it has: later answers are of another time. A worker that has answered nothing
# for so long is not waited for.
BLOCK_S = 900.0
# The difference of logarithms below which versions count as equally fast.
SAME = math.log(1.05)
# Without a decision after so many tokens of the canary, the versions count as equally fast.
MOST_TOKENS = 300_000
# So long without an answer of the canary, although by its share so many were expected: it cannot be served. (That none
# comes by chance has the probability e^-14.)
SILENT_S, EXPECTED_ANSWERS = 3600.0, 14.0
# Shares in thousandths, and comparisons that a share needs before the next, at most half of them of one worker of
# several. 1000 is the promotion.
SHARES, LEAST_BLOCKS = (50, 200, 500), 6
PROMOTED_FROM = 200
# Workers whose evidence is kept apart; further ones share a place with one of them.
MAX_GROUPS = 64
# Blocks that are open at once.
MAX_OPEN = 512

_TESTS: Mapping[str, Callable[[float], float]] = {
    "faster": lambda d: -d,
    "slower": lambda d: d,
    "not_faster": lambda d: d + SAME,
    "not_slower": lambda d: SAME - d,
}


class Outcome(StrEnum):
    GROW = "grow"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"
    NO_DIFFERENCE = "no_difference"
    SILENT = "silent"


@dataclass(frozen=True)
class Verdict:
    """What is to be done, to which share in thousandths if that is to grow, and why, in a line for people."""

    outcome: Outcome
    why: str
    share_per_mille: int = 0


@dataclass
class _Open:
    began_s: float
    incumbent: Served = NOTHING
    canary: Served = NOTHING


@dataclass
class _Group:
    """What one worker, or several that share a place, have shown, with how many comparisons since the share is what it
    is, and when they answered last."""

    blocks_at_share: int = 0
    seen_s: float = 0.0
    logs: dict[str, list[float]] = field(default_factory=lambda: {name: [0.0] * NUM_STAKES for name in _TESTS})


@dataclass
class Trial:
    """One comparison, which ends with it. Times are seconds of a clock that never goes back, of this process."""

    incumbent: int
    canary: int
    began_s: float
    groups: dict[str, _Group] = field(default_factory=dict)
    # Comparisons, and the sums of both versions in all blocks; what the alias' own version would have taken for the
    # canary's tokens, by the blocks they were in.
    num_blocks: int = 0
    share_per_mille: int = 0
    served: Served = NOTHING
    instead_s: float = 0.0
    incumbent_served: Served = NOTHING
    _open: dict[tuple[str, int], _Open] = field(default_factory=dict)
    # When the canary answered last, and how often the other version has since.
    _answered_s: float = 0.0
    _num_since: float = 0.0

    def __post_init__(self) -> None:
        self._answered_s = self.began_s

    def observe(self, worker_id: str, load: int, version: int, served: Served, now_s: float) -> None:
        """Counts what a worker has newly served under one load."""
        if version not in (self.incumbent, self.canary):
            return
        place = worker_id, load
        self.groups.setdefault(self._group_of(worker_id), _Group()).seen_s = now_s
        block = self._open.get(place)
        if block is not None and now_s - block.began_s > BLOCK_S:
            self._close(worker_id, self._open.pop(place))
            block = None
        if block is None:
            while len(self._open) >= MAX_OPEN:
                self._open.pop(next(iter(self._open)))
            block = self._open[place] = _Open(now_s)
        if version == self.canary:
            block.canary = block.canary.plus(served)
            self._answered_s, self._num_since = now_s, 0.0
        else:
            block.incumbent = block.incumbent.plus(served)
            self._num_since += served.num_requests
        if min(block.canary.num_requests, block.incumbent.num_requests) >= LEAST_ANSWERS:
            self._close(worker_id, self._open.pop(place))

    def _close(self, worker_id: str, block: _Open) -> None:
        mine, others = block.canary, block.incumbent
        if not mine.num_requests or not others.num_requests:
            return
        difference = mine.weighted_log / mine.weight - others.weighted_log / others.weight
        group = self.groups[self._group_of(worker_id)]
        for name, x in _TESTS.items():
            group.logs[name] = after(group.logs[name], x(difference), BOUND)
        group.blocks_at_share += 1
        self.num_blocks += 1
        self.served = self.served.plus(mine)
        self.incumbent_served = self.incumbent_served.plus(others)
        self.instead_s += others.seconds / others.num_tokens * mine.num_tokens

    def _group_of(self, worker_id: str) -> str:
        if worker_id in self.groups or len(self.groups) < MAX_GROUPS:
            return worker_id
        return sorted(self.groups)[sum(worker_id.encode()) % MAX_GROUPS]

    def evidence(self, test: str, now_s: float) -> tuple[float, float]:
        """The natural logarithm of the evidence of all workers, and where several serve of all but one of these: the
        least and the largest of them."""
        total = joined(group.logs[test] for group in self.groups.values())
        serving = [group.logs[test] for group in self._serving(now_s)]
        without = [log_evidence(_without(total, logs)) for logs in serving if len(serving) > 1]
        return min(found := [log_evidence(total), *without]), max(found)

    def _serving(self, now_s: float) -> list[_Group]:
        return [group for group in self.groups.values() if now_s - group.seen_s <= BLOCK_S]

    def _may_grow(self, now_s: float) -> bool:
        most = LEAST_BLOCKS // 2 if len(self._serving(now_s)) > 1 else LEAST_BLOCKS
        compared = sum(min(group.blocks_at_share, most) for group in self.groups.values())
        # Here no worker may hide what the others find.
        return compared >= LEAST_BLOCKS and self.evidence("slower", now_s)[1] <= 0

    def verdict(self, share_per_mille: int, now_s: float) -> Verdict | None:
        """What is to be done now, with the canary at this share. None: nothing yet."""
        if share_per_mille != self.share_per_mille:
            self.share_per_mille = share_per_mille
            for group in self.groups.values():
                group.blocks_at_share = 0
        decided = -math.log(ALPHA)
        evidence = {test: self.evidence(test, now_s)[0] for test in _TESTS}
        if evidence["slower"] >= decided:
            return Verdict(Outcome.ROLL_BACK, self.figures())
        if share_per_mille >= PROMOTED_FROM and evidence["faster"] >= decided:
            return Verdict(Outcome.PROMOTE, self.figures())
        if min(evidence["not_faster"], evidence["not_slower"]) >= decided:
            return Verdict(Outcome.NO_DIFFERENCE, self.figures())
        if self.served.num_tokens >= MOST_TOKENS:
            return Verdict(Outcome.NO_DIFFERENCE, f"undecided after {MOST_TOKENS} tokens; {self.figures()}")
        is_missed = self._num_since * share_per_mille / 1000 > EXPECTED_ANSWERS
        if is_missed and now_s - self._answered_s > SILENT_S:
            return Verdict(Outcome.SILENT, f"no answer of it for {SILENT_S / 60:.0f} minutes; {self.figures()}")
        larger = next((share for share in SHARES if share > share_per_mille), 0)
        if larger and self._may_grow(now_s):
            return Verdict(Outcome.GROW, self.figures(), larger)
        return None

    @property
    def speed_up(self) -> float:
        """How many times as long the alias' own version would have taken for the canary's tokens; 0: not known."""
        return self.instead_s / self.served.seconds if self.served.seconds else 0.0

    def figures(self) -> str:
        """A line for people."""
        if not self.num_blocks:
            return "no comparison yet"
        return (
            f"{self.speed_up:.3f}x as fast at equal tokens ({self.served.num_tokens:.0f} tokens of {self.canary} in "
            f"{self.served.num_requests:.0f} answers, {self.num_blocks} comparisons with {self.incumbent}); "
            f"{accepted_per_pass(self.served):.2f} accepted drafts per pass against "
            f"{accepted_per_pass(self.incumbent_served):.2f}"
        )

    def to_record(self, now_s: float) -> dict[str, Any]:
        """What outlives this process: all but open blocks. Times are how long ago."""
        return {
            "incumbent": self.incumbent,
            "canary": self.canary,
            "groups": {name: {**asdict(group), "seen_s": now_s - group.seen_s} for name, group in self.groups.items()},
            "num_blocks": self.num_blocks,
            "share_per_mille": self.share_per_mille,
            "served": list(self.served),
            "instead_s": self.instead_s,
            "incumbent_served": list(self.incumbent_served),
            "answered_s": now_s - self._answered_s,
            "num_since": self._num_since,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], now_s: float) -> "Trial":
        """Raises ValueError, KeyError or TypeError for what is no record of this build."""
        groups = {
            str(name): _Group(
                int(group["blocks_at_share"]),
                now_s - float(group["seen_s"]),
                {test: read_logs(group["logs"][test]) for test in _TESTS},
            )
            for name, group in record["groups"].items()
        }
        trial = cls(
            int(record["incumbent"]),
            int(record["canary"]),
            now_s,
            groups,
            int(record["num_blocks"]),
            int(record["share_per_mille"]),
            Served._make(map(float, record["served"])),
            float(record["instead_s"]),
            Served._make(map(float, record["incumbent_served"])),
        )
        trial._answered_s, trial._num_since = now_s - float(record["answered_s"]), float(record["num_since"])
        return trial


def accepted_per_pass(served: Served) -> float:
    return served.num_tokens / served.num_passes - 1 if served.num_passes else 0.0


def _without(total: Iterable[float], part: Iterable[float]) -> list[float]:
    return [all_of_it - its for all_of_it, its in zip(total, part, strict=True)]
