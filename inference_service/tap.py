"""The tap: keeps a share of the answers that a worker has served, for routers to learn from.

A request's part is a list of references and, at its end, one append. A thread of its own writes, at the least priority
and while no request runs, if that comes soon enough. Whatever goes wrong there loses what was to be written, which is
counted and logged, and no token of an answer.
"""

import os
import random
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from threading import Event, Lock, Thread, get_native_id

import structlog

from inference_service.metrics import WorkerMetrics
from shared.engine.request.request import GenerationEvent, GenerationRequest, TokenChunk
from shared.errors import NeapError
from shared.traffic.answer import HOUR_S, ServedAnswer
from shared.traffic.encoding import MAX_CONTENT_BYTES, content_bytes
from shared.traffic.traffic import EXPIRE_EVERY_S, Traffic

# In --learn: every pool that is not named.
ANY_POOL = "*"
# Tokens that wait to be written, of 4 bytes each. Further answers are lost.
MAX_TOKENS = 1 << 20
# How old the oldest answer is at least and at most when it is written: the first while no request runs.
IDLE_AFTER_S, AT_MOST_S = 30.0, 120.0
# Workers that start together do not look together whether somebody has removed what is old.
_FIRST_EXPIRY_WITHIN_S = 60.0
_CLOSE_S = 10.0
_LOOK_S = 1.0
_LEAST_PRIORITY = 19

log = structlog.get_logger("neap.learn")


class Tap:
    """Keeps of each pool of `shares` that part of its answers (0 to 1), in `traffic`, for `retention_s`.

    `take` and what it returns belong to the event loop. `is_idle`: whether no request runs. `clock`: Unix seconds.
    """

    def __init__(
        self,
        traffic: Traffic,
        shares: Mapping[str, float],
        metrics: WorkerMetrics,
        *,
        retention_s: float,
        is_idle: Callable[[], bool],
        max_tokens: int = MAX_TOKENS,
        idle_after_s: float = IDLE_AFTER_S,
        at_most_s: float = AT_MOST_S,
        look_s: float = _LOOK_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._traffic, self._shares, self._metrics = traffic, shares, metrics
        self._retention_s, self._is_idle, self._clock = retention_s, is_idle, clock
        self._max_tokens, self._idle_after_s, self._at_most_s = max_tokens, idle_after_s, at_most_s
        self._look_s = look_s
        self._lock = Lock()
        self._waiting: list[ServedAnswer] = []
        self._num_tokens = 0
        self._oldest_s = 0.0
        self._expire_at_s = time.monotonic() + random.uniform(0, _FIRST_EXPIRY_WITHIN_S)
        self._failing = ""
        self._stop = Event()
        self._thread = Thread(target=self._run, name="neap-learn", daemon=True)
        self._thread.start()

    def take(self, pool: str, numerics_id: str) -> "TakenAnswer | None":
        """What collects the answer to a request of `pool`, None if it is not kept."""
        share = self._shares.get(pool, self._shares.get(ANY_POOL, 0.0))
        # random() is below 1, so a share of 1 keeps all.
        return TakenAnswer(self, pool, numerics_id) if random.random() < share else None

    def keep(
        self, model_id: str, pool: str, numerics_id: str, request: GenerationRequest, token_ids: "array[int]"
    ) -> None:
        """Hands a whole answer over to the thread that writes."""
        answer = ServedAnswer(
            model_id,
            pool,
            request.router_version,
            numerics_id,
            int(self._clock()) // HOUR_S,
            array("I", request.prompt_ids),
            array("I", request.resumed_ids) + token_ids,
        )
        if content_bytes(answer) > MAX_CONTENT_BYTES:
            return self._count_lost([answer], "TOO_LONG")
        with self._lock:
            is_full = self._num_tokens + answer.num_tokens > self._max_tokens
            if not is_full:
                if not self._waiting:
                    self._oldest_s = time.monotonic()
                self._waiting.append(answer)
                self._num_tokens += answer.num_tokens
        if is_full:
            self._count_lost([answer], "BUFFER_FULL")
        return None

    def close(self) -> None:
        """Writes what is there, for at most some seconds. The storage may hang."""
        self._stop.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere this would be the priority of the whole process
            os.setpriority(os.PRIO_PROCESS, get_native_id(), _LEAST_PRIORITY)
        while not self._stop.wait(self._look_s):
            if self._is_due():
                self._write()
            if time.monotonic() >= self._expire_at_s:
                self._expire()
        self._write()

    def _is_due(self) -> bool:
        if not self._waiting:
            return False
        age_s = time.monotonic() - self._oldest_s
        is_much = self._num_tokens > self._max_tokens // 2
        return is_much or age_s >= self._at_most_s or (age_s >= self._idle_after_s and self._is_idle())

    def _write(self) -> None:
        with self._lock:
            answers, self._waiting, self._num_tokens = self._waiting, [], 0
        # By their random ids, so that no order of requests is kept either.
        in_order = sorted(answers, key=lambda answer: (_place(answer), answer.id))
        for place, group in groupby(in_order, key=_place):
            together = list(group)
            reason = self._attempt(lambda kept=together: self._traffic.write(kept))  # type: ignore[misc]
            if reason:
                self._count_lost(together, reason)
            else:
                self._metrics.learn_answers.labels(*place).inc(len(together))
                self._metrics.learn_tokens.labels(*place).inc(sum(answer.num_tokens for answer in together))

    def _expire(self) -> None:
        self._expire_at_s = time.monotonic() + EXPIRE_EVERY_S * random.uniform(1.0, 1.1)
        self._attempt(lambda: self._traffic.expire_if_due(self._retention_s))

    def _attempt(self, work: Callable[[], object]) -> str:
        """The reason why it failed, "" if it did not. Said once for each reason in a row."""
        try:
            work()
        except Exception as error:
            reason = error.reason if isinstance(error, NeapError) else "INTERNAL"
            if reason != self._failing:
                log.warning(
                    "served answers are not kept: what is to be learned from is lost, and no answer",
                    reason=reason,
                    exc_info=not isinstance(error, NeapError),
                )
            self._failing = reason
            return reason
        if self._failing:
            log.info("served answers are kept again")
        self._failing = ""
        return ""

    def _count_lost(self, answers: list[ServedAnswer], reason: str) -> None:
        for answer in answers:
            self._metrics.learn_lost.labels(*_place(answer), reason).inc()


class TakenAnswer:
    """Collects an answer's tokens while it is served."""

    def __init__(self, tap: Tap, pool: str, numerics_id: str) -> None:
        self._tap, self._pool, self._numerics_id = tap, pool, numerics_id
        self._parts: list[Sequence[int]] = []

    def add(self, event: GenerationEvent) -> None:
        if isinstance(event, TokenChunk):
            self._parts.append(event.token_ids)

    def keep(self, model_id: str, request: GenerationRequest) -> None:
        """After the client has got all of it. An answer without a token is not kept."""
        token_ids = array("I", chain.from_iterable(self._parts))
        if token_ids:
            self._tap.keep(model_id, self._pool, self._numerics_id, request, token_ids)


def _place(answer: ServedAnswer) -> tuple[str, str]:
    return answer.model_id, answer.pool
