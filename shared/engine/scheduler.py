"""Which requests wait, which run, and whether their keys and values fit.
Pure: no thread, no lock, no clock, no tensor."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Protocol, TypeVar

from shared.engine.turns import Runs, Turns, deal, in_the_way
from shared.errors import RETRY_AFTER_S, Exhausted


class Schedulable(Runs, Protocol):
    """A request as the scheduler sees it. `deadline_s` is on the caller's clock."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def deadline_s(self) -> float: ...
    @property
    def is_cancelled(self) -> bool: ...


@dataclass(frozen=True)
class SchedulerLimits:
    """`max_running` requests share a step. `kv_budget_tokens`: positions of keys and values that all running requests
    share.

    `max_queue` requests may wait, with prompts of at most `max_queue_tokens` tokens together. A single longer prompt
    may wait when nothing else does.
    """

    max_running: int
    max_queue: int
    max_queue_tokens: int
    kv_budget_tokens: int


R = TypeVar("R", bound=Schedulable)


class Scheduler(Generic[R]):
    """The lowest priority first. Clients of equal ones take turns, then those behind one client, and of one of these
    first come, first served. A request that does not fit yet holds back those behind it, so that no large request
    starves. Requests do not count those behind them when they look for room in the queue. Running ones are put back
    into the queue, before others of their priority, if that lets one with a lower number run.

    A paused request (its client has stopped reading) keeps its keys and values, but it does not count against
    `max_running`: clients that stop reading must not stop the others. If more go on than may share a step, they take
    turns. Not thread-safe: the caller holds a lock.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._waiting: deque[R] = deque()
        self._running: list[R] = []
        self._turns = Turns()

    def __iter__(self) -> Iterator[R]:
        """All requests, running ones first."""
        return chain(self._running, self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[R]:
        """Requests that were admitted and have not been removed."""
        return list(self._running)

    @property
    def runnable(self) -> list[R]:
        """Running requests that are not paused, in the order in which they were admitted, or of their turns."""
        return [request for request in self._running if not request.is_paused]

    def next_turn(self) -> list[R]:
        """The runnable requests of the next step, at most `max_running`.
        Those left out come first in the turn after it."""
        runnable = self.runnable
        turn = runnable[: self.limits.max_running]
        if len(turn) < len(runnable):
            self._running = [request for request in self._running if request not in turn] + turn
        return turn

    @property
    def num_kv_tokens(self) -> int:
        """Positions of keys and values that running requests have reserved."""
        return sum(request.num_kv_tokens for request in self._running)

    @property
    def num_free_kv_tokens(self) -> int:
        return self.limits.kv_budget_tokens - self.num_kv_tokens

    def add(self, request: R) -> None:
        """Appends a request to the queue. Raises `Exhausted` (reason QUEUE_FULL)."""
        rank = request.priority, self._turns.next_of(request)
        ahead = [waiting for waiting in self._waiting if (waiting.priority, waiting.turn) <= rank]
        num_tokens = sum(waiting.num_prompt_tokens for waiting in ahead)
        is_too_long = num_tokens + request.num_prompt_tokens > self.limits.max_queue_tokens
        if len(ahead) >= self.limits.max_queue or (ahead and is_too_long):
            raise Exhausted(
                f"{len(ahead)} requests with {num_tokens} prompt tokens are already waiting",
                reason="QUEUE_FULL",
                retry_after_s=RETRY_AFTER_S,
            )
        self._turns.wait(request)
        self._waiting.insert(len(ahead), request)
        deal(request, self._waiting, self._running)
        self._sort()

    def _sort(self) -> None:
        """By priority and turn. The order of equal ones stays."""
        self._waiting = deque(sorted(self._waiting, key=lambda waiting: (waiting.priority, waiting.turn)))

    def remove_ended(self, now_s: float) -> list[R]:
        """Removes and returns the requests that were cancelled or whose deadline has passed."""
        ended = [request for request in self if _has_ended(request, now_s)]
        for request in ended:
            self.remove(request)
        return ended

    def admit(self) -> list[R]:
        """Moves waiting requests to the running ones, as long as the first of them fits, and returns those moved."""
        admitted = []
        while self.can_admit:
            admitted.append(self._waiting.popleft())
            self._turns.come(admitted[-1], self._waiting)
            self._running.append(admitted[-1])
        return admitted

    def put_back(self) -> list[R]:
        """Moves running requests back into the queue, as few as are needed to let the first waiting one run (see
        `in_the_way`). Returns them; none if that would not help."""
        if not (chosen := self._in_the_way()):
            return []
        first = self._waiting[0]
        for request in chosen:
            self._running.remove(request)
            self._turns.put_back(request, first)
            self._waiting.appendleft(request)
        self._sort()
        return chosen

    def _in_the_way(self) -> list[R]:
        """The running requests that `put_back` moves."""
        if not self._waiting or self.can_admit:
            return []
        first = self._waiting[0]
        num_missing_tokens = first.num_kv_tokens - self.num_free_kv_tokens
        num_missing_places = len(self.runnable) + 1 - self.limits.max_running
        return in_the_way(first, self._running, num_missing_tokens, num_missing_places)

    @property
    def can_admit(self) -> bool:
        """Whether a request waits and the first that does may run now."""
        return (
            bool(self._waiting)
            and len(self.runnable) < self.limits.max_running
            and self._waiting[0].num_kv_tokens <= self.num_free_kv_tokens
        )

    def remove(self, request: R) -> None:
        """Forgets a request, whether it waits or runs.
        Does nothing if it is not there: a request may end for two reasons at once."""
        for requests in (self._running, self._waiting):
            if request in requests:
                requests.remove(request)
                if requests is self._waiting:
                    self._turns.leave(request, self._waiting)

    def clear(self) -> list[R]:
        """Forgets all requests and returns them."""
        requests = list(self)
        self._running.clear()
        self._waiting.clear()
        return requests

    def has_work(self, now_s: float) -> bool:
        """Whether a step would do anything: a request can be admitted, can run, has ended, or others are put back."""
        if self.can_admit or self.runnable or any(_has_ended(request, now_s) for request in self):
            return True
        return bool(self._in_the_way())

    @property
    def next_deadline_s(self) -> float:
        """The earliest deadline of all requests; infinite if there is none."""
        return min((request.deadline_s for request in self), default=math.inf)


def _has_ended(request: Schedulable, now_s: float) -> bool:
    return request.is_cancelled or request.deadline_s <= now_s
