"""Takes workers' reports, and tells what is new in each. Pure: no clock, no thread.

A report has a worker's sums since it started, and the number of the report. So a report that is lost, comes twice, late
or in another order changes nothing: what counts is the difference from the last one that was taken. The first report of
a worker only begins it, and so does the first after this service was started: what it served before is not counted.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.errors import InvalidInput
from shared.registry.names import check_alias, check_model_id
from shared.served import MAX_SERVED, MOST_TOKENS, NOTHING, Served, ServedKey

# Workers whose last report is kept; the one that has been silent for longest is forgotten first.
MAX_WORKERS = 256
MAX_LOAD = 16
# What fits into a double and is more than a worker serves in its life.
_LARGEST = 2.0**50
# No worker runs more requests at once, so that it cannot spend more than so many seconds per second. Reports wait in
# between: _SLACK_S.
_MOST_RUNNING, _SLACK_S = 4096, 60.0
# The logarithm of seconds per token at most: from picoseconds to years.
_LARGEST_LOG = 30.0

Sums = Mapping[ServedKey, Served]


@dataclass
class _Worker:
    sender: str
    sequence: int
    taken_s: float
    sums: dict[ServedKey, Served] = field(default_factory=dict)


class ReportBook:
    """The last report of each worker and model."""

    def __init__(self) -> None:
        self._workers: OrderedDict[tuple[str, str], _Worker] = OrderedDict()

    def take(
        self, sender: str, worker_id: str, model_id: str, sequence: int, sums: Sums, now_s: float
    ) -> list[tuple[ServedKey, Served]] | None:
        """Return what the worker has served since its last report. None: this one is late, or came before.

        `sender`: as whom the worker calls; another caller's report of the same worker is refused. `now_s`: of a clock
        that never goes back. Raises InvalidInput (BAD_REPORT, BAD_MODEL_ID, BAD_ALIAS), after which the last report
        stands as it was.
        """
        check_model_id(model_id)
        _check(worker_id, sequence, sums)
        place = worker_id, model_id
        worker = self._workers.get(place)
        if worker is None:
            self._workers[place] = _Worker(sender, sequence, now_s, dict(sums))
            while len(self._workers) > MAX_WORKERS:
                self._workers.popitem(last=False)
            return []
        if worker.sender != sender:
            raise _bad(f"worker {worker_id} has reported as another caller")
        if sequence <= worker.sequence:
            return None
        new = [(key, served.minus(worker.sums.get(key, NOTHING))) for key, served in sums.items()]
        new = [(key, served) for key, served in new if served.num_requests]
        for key, served in new:
            _check_new(key, served, (now_s - worker.taken_s + _SLACK_S) * _MOST_RUNNING)
        self._workers[place] = _Worker(sender, sequence, now_s, dict(sums))
        self._workers.move_to_end(place)
        return new


def _check(worker_id: str, sequence: int, sums: Sums) -> None:
    if not 8 <= len(worker_id) <= 64 or not worker_id.isalnum() or not worker_id.isascii():
        raise _bad("worker_id must be 8 to 64 letters and digits")
    if not 1 <= sequence < _LARGEST:
        raise _bad(f"sequence is {sequence}; reports are numbered from 1")
    if len(sums) > MAX_SERVED:
        raise _bad(f"the report has {len(sums)} entries; at most {MAX_SERVED} are allowed")
    for key, served in sums.items():
        if not 0 <= key.version < _LARGEST or not 0 <= key.load <= MAX_LOAD:
            raise _bad(f"version {key.version} under load {key.load} is out of range")
        if key.alias:
            check_alias(key.alias)
        if not all(map(math.isfinite, served)) or max(map(abs, served)) > _LARGEST or min(served[:-1]) < 0:
            raise _bad(f"the sums of version {key.version} are not finite, negative or too large")


def _check_new(key: ServedKey, served: Served, most_s: float) -> None:
    """Whether answers can have such sums. Rounding makes a difference of large sums a little wrong."""
    is_right = (
        min(served[:-1]) >= -1e-3
        and served.num_requests <= served.num_passes <= served.num_tokens
        and 0 < served.weight <= served.num_tokens + 1e-3
        and served.weight <= served.num_requests * MOST_TOKENS + 1e-3
        and abs(served.weighted_log) <= served.weight * _LARGEST_LOG
        and 0 < served.seconds <= most_s
        and served.full_seconds <= served.seconds * served.num_tokens + 1e-3
    )
    if not is_right:
        raise _bad(f"no answers have the sums of version {key.version} under load {key.load}")


def _bad(why: str) -> InvalidInput:
    return InvalidInput(why, reason="BAD_REPORT")
