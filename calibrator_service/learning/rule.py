"""When a pool's router learns again: a pure rule over what is kept and what was done."""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.traffic.traffic import Batch

# A pool whose jobs fail is tried again after 2, 4, .. times the interval, and at least once in this multiple of it.
MAX_BACKOFF = 64
LOST_PART = 10


@dataclass(frozen=True)
class LearningRule:
    """A job begins with at least `min_tokens` new tokens, or with a LOST_PART-th of them where the router's drafts are
    accepted less often than they were, and at least `min_interval_s` after the last began."""

    min_tokens: int = 20_000
    min_interval_s: float = 1800.0

    def least_tokens(self, *, has_lost: bool) -> int:
        return max(self.min_tokens // LOST_PART if has_lost else self.min_tokens, 1)


@dataclass(frozen=True)
class PoolState:
    """What the schedule keeps of a pool.

    `counted_s`: when the newest object was written that the last job could read, by the store's clock. `began_s`: when
    the job was created (Unix seconds). `num_failed`: jobs in a row that failed. `calibration_id`: the last job, until
    its end was seen. `is_alone`: the next one has no parent, because the last failed for that. For people: `last_job`,
    `why` it began, and its `outcome`.
    """

    counted_s: float = 0.0
    began_s: float = 0.0
    num_failed: int = 0
    calibration_id: str = ""
    is_alone: bool = False
    last_job: str = ""
    why: str = ""
    outcome: str = ""

    def new_tokens(self, batches: Iterable[Batch]) -> int:
        """Tokens written since. If the store's clock was put back, all that is kept counts as new, once."""
        written = [(batch.stored.last_modified_s, batch.num_tokens) for batch in batches]
        counted_s = self.counted_s if max(written, default=(0.0, 0))[0] >= self.counted_s else 0.0
        return sum(num_tokens for written_s, num_tokens in written if written_s > counted_s)

    def may_begin(self, rule: LearningRule, now_s: float) -> bool:
        """Whether the interval is over. A clock that was put back ends it."""
        return not self.began_s <= now_s < self.next_s(rule)

    def next_s(self, rule: LearningRule) -> float:
        """When the interval is over (Unix seconds)."""
        return self.began_s + rule.min_interval_s * min(1 << self.num_failed, MAX_BACKOFF)

    def is_due(self, rule: LearningRule, num_new_tokens: int, now_s: float, *, has_lost: bool = False) -> bool:
        """`has_lost`: the router's drafts are accepted less often than they were."""
        return num_new_tokens >= rule.least_tokens(has_lost=has_lost) and self.may_begin(rule, now_s)
