"""The engine's thread: it owns the model, takes requests up, steps them together, and ends each of them."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from inference_service.engine.admission import Admission
from inference_service.engine.bindings import Binding, Bindings
from inference_service.engine.chores import Chores
from inference_service.engine.costs import measure_deep, measure_wide
from inference_service.engine.decoder import Decoder
from inference_service.engine.drafting import Drafter
from inference_service.engine.failure import failure_of
from inference_service.engine.handle import EngineEvent, GenerationHandle
from inference_service.engine.lifetime import stop_at_exit
from inference_service.engine.planner import PassCosts
from inference_service.engine.sequence import Sequence
from inference_service.engine.shadow import Shadow
from shared.errors import Cancelled, DeadlineExceeded, NeapError, Unavailable
from shared.ladder.ladder import Ladder

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A request from its submission to its end. `binding` None: its ladder is not known to be bound; `awaited`: it is being bound."""

    handle: GenerationHandle
    ladder: Ladder | None
    binding: Binding | None = None
    awaited: "Future[None] | None" = None
    sequence: Sequence | None = None


class _Stopped(Exception):
    """The engine is to end before it has become ready."""


class EngineLoop:
    """Starts its thread when it is made. `lock` guards `waiting`, `running`, `chores` and `ended`; only the thread changes `running`.

    `ladder` is bound before the loop is ready. `on_failure` is called by the thread should it end by itself. The thread ends when
    `request_stop` has been called, at the latest when the interpreter exits.
    """

    def __init__(
        self,
        decoder: Decoder,
        shadow: Shadow,
        admission: Admission,
        bindings: Bindings,
        *,
        max_running: int,
        ladder: Ladder | None,
        on_failure: Callable[[], object],
    ) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[Job] = deque()
        self.running: deque[Job] = deque()
        self.chores = Chores()
        self.costs: PassCosts | None = None
        # Why nothing runs any more.
        self.ended: NeapError | None = None
        self.is_ready = threading.Event()
        self.ladder_failure: NeapError | None = None
        self._decoder, self._shadow = decoder, shadow
        self._admission, self._bindings = admission, bindings
        self._bindings.in_use = lambda: {id(job.ladder) for job in self.running}
        self._max_running = max_running
        self._on_failure = on_failure
        self._is_stopping = False
        # Held by the thread while it works; a fork takes it, and clears `_may_work` so that it gets it.
        self._working = threading.Lock()
        self._may_work = threading.Event()
        self._may_work.set()
        # Whoever has news for the thread puts None; unlike a condition it may be called by finalisers.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(ladder,), name="neap-engine", daemon=True
        )
        stop_at_exit(self)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._is_stopping or self.ended is not None

    def why_closed(self) -> NeapError:
        return self.ended or stopping()

    def wake(self) -> None:
        self._news.put(None)

    def request_stop(self) -> None:
        """See `Stoppable`."""
        self._is_stopping = True
        self.wake()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def hold(self) -> None:
        """See `Stoppable`. The thread itself may fork, in a callback."""
        if threading.current_thread() is not self._thread:
            self._may_work.clear()
            self._working.acquire()

    def release(self) -> None:
        """See `Stoppable`."""
        if threading.current_thread() is not self._thread:
            self._working.release()
            self._may_work.set()

    def forget(self) -> None:
        """See `Stoppable`. The parent's thread may have held the lock."""
        self.lock = threading.Lock()
        self.ended = Unavailable(
            "the engine runs in the process that forked this one", reason="FORKED"
        )
        self.waiting, self.running, self.chores = deque(), deque(), Chores()
        self.is_ready = threading.Event()
        self.is_ready.set()

    def kv_taken(self) -> int:
        return sum(self._admission.kv_bytes(job.handle.request) for job in self.running)

    # From here on: the engine's thread.

    def _run(self, ladder: Ladder | None) -> None:
        ended = stopping()
        try:
            with self._working:
                self._make_ready(ladder)
            self.is_ready.set()
            while self._wait_for_work():
                self._may_work.wait()
                with self._working:
                    self._turn()
        except _Stopped:
            pass
        except BaseException:
            logger.exception("the engine has failed")
            ended = Unavailable("the engine has failed", reason="ENGINE_FAILED")
        with self.lock:
            self.ended = ended
            jobs = [*self.running, *self.waiting]
            self.running.clear()
            self.waiting.clear()
            self.chores.close(ended)
        self.is_ready.set()
        for job in jobs:
            self._end(job, ended)
        if ended.reason == "ENGINE_FAILED":
            self._on_failure()

    def _make_ready(self, ladder: Ladder | None) -> None:
        runner = self._decoder.runner
        self._work_off(runner.prepare(()))
        deep = measure_deep(runner, between=self._check_stop)
        wide = measure_wide(runner, deep, between=self._check_stop)
        self.costs = self._admission.costs = PassCosts(deep, wide=wide)
        if ladder is None:
            return
        try:
            self._work_off(self._bindings.prepare(ladder, self.costs, self_tests=False))
        except _Stopped:
            raise
        except Exception as error:  # requests that need it will be told; others do not need it
            logger.exception("the engine's own ladder could not be bound")
            self.ladder_failure = failure_of(error)

    def _work_off(self, slices: Iterator[None]) -> None:
        for _ in slices:
            self._check_stop()

    def _check_stop(self) -> None:
        """Between the passes of `_make_ready`: lets a fork happen. Raises `_Stopped`."""
        if not self._may_work.is_set():
            self._working.release()
            self._may_work.wait()
            self._working.acquire()
        if self._is_stopping:
            raise _Stopped

    def _wait_for_work(self) -> bool:
        """False once the engine is to stop. Wakes for deadlines, too: a paused request may run into its own."""
        while not self._is_stopping:
            while not self._news.empty():
                self._news.get_nowait()
            with self.lock:
                jobs = [*self.running, *self.waiting]
                if (
                    (self.waiting and self._has_room())
                    or any(not job.handle.is_paused for job in self.running)
                    or not (self.chores.is_empty and self._shadow.is_idle)
                    or any(self._is_over(job) for job in jobs)
                ):
                    return not self._is_stopping
            deadline = min((job.handle.request.deadline_s for job in jobs), default=None)
            wait_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if wait_s is not None and wait_s >= threading.TIMEOUT_MAX:
                wait_s = None
            with suppress(queue.Empty):
                self._news.get(timeout=wait_s)
        return False

    def _turn(self) -> None:
        """Lets go of what is over, takes in what waits, and steps all requests that are not paused."""
        with self.lock:
            over = [job for job in (*self.running, *self.waiting) if self._is_over(job)]
            for job in over:
                (self.running if job in self.running else self.waiting).remove(job)
            while self.waiting and self._has_room():
                self.running.append(self.waiting.popleft())
            taken = self.kv_taken()
            ready = [job for job in self.running if not job.handle.is_paused]
        for job in over:
            if job.handle.is_cancelled:
                self._end(job, Cancelled("the request was cancelled"))
            else:
                self._end(job, DeadlineExceeded("the deadline passed during generation"))
        # What is kept for later makes room for what runs now.
        num_slots = (self._admission.kv_budget_bytes - taken) // self._admission.slot_bytes
        self._shadow.make_room(num_slots)
        self._decoder.prefixes.fit(num_slots - self._shadow.num_slots)
        going = [job for job in ready if self._has_started(job)]
        if going:
            self._step(going)
            self.chores.after_step()
        elif not self.chores.is_empty:
            self.chores.slice()
        elif not self._shadow.is_idle:
            self._shadow.slice(num_slots)
        self._bindings.fit()

    def _has_started(self, job: Job) -> bool:
        """Whether the job can be stepped. One whose ladder is not bound waits for that, which is done between the others' steps."""
        if job.sequence is not None:
            return True
        assert self.costs is not None
        try:
            job.binding = self._bindings.find(job.ladder, self.costs)
            if job.binding is None:
                assert job.ladder is not None
                if job.awaited is not None and job.awaited.done():
                    job.awaited.result()  # raises why it could not be bound
                with self.lock:
                    if job.awaited is None or job.awaited.done():
                        slices = self._bindings.prepare(job.ladder, self.costs, self_tests=False)
                        job.awaited = self.chores.add(slices)
                return False
            bound, drafter = job.binding
            request = job.handle.request
            job.sequence = self._decoder.start(request, bound, drafter.served(request))
            job.sequence.submitted_s = job.handle.submitted_s
            job.handle.started_s = time.monotonic()
        except Exception as error:
            logger.exception("a request could not be started: %s", job.handle.request.request_id)
            self._leave(job, failure_of(error))
            return False
        return True

    def _step(self, jobs: list[Job]) -> None:
        """One step for all of `jobs`; those that are complete or have failed leave."""
        assert self.costs is not None
        failure: NeapError | None = None
        results = []
        try:
            results = self._decoder.step([_member(job) for job in jobs], self.costs)
        except Exception as error:
            # Nobody knows what it left behind.
            ids = ", ".join(job.handle.request.request_id for job in jobs)
            logger.exception("a step failed for %s", ids)
            failure = failure_of(error)
        if failure is not None:
            for job in jobs:
                job.sequence = None
                self._leave(job, failure_of(failure))
        for job, chunks in zip(jobs, results, strict=failure is None):
            for chunk in chunks:
                self._deliver(job, chunk)
            sequence = job.sequence
            assert sequence is not None
            if sequence.failure is not None:
                failure, job.sequence = sequence.failure, None  # its cache is kept for nobody
                self._leave(job, failure)
            elif sequence.is_finished:
                self._finish(job, sequence)
        if failure is not None:
            self._decoder.check_model()

    def _finish(self, job: Job, sequence: Sequence) -> None:
        try:
            finished = sequence.finished()
        except Exception as error:
            logger.exception("a request could not be closed: %s", sequence.request.request_id)
            self._leave(job, failure_of(error))
            return
        self._deliver(job, finished)
        try:
            budget = self._admission.kv_budget_bytes // self._admission.slot_bytes
            self._shadow.offer(sequence, budget)
        except Exception:  # the answer is whole; only its check is missing
            logger.exception("an answer could not be offered for a shadow check")
        self._leave(job, None)

    def _has_room(self) -> bool:
        """Whether the first that waits may start. The later ones wait behind it, so that no large request starves.

        A paused request keeps its cache but not its turn: clients that stop reading must not stop the others.
        """
        if sum(not job.handle.is_paused for job in self.running) >= self._max_running:
            return False
        wanted = self._admission.kv_bytes(self.waiting[0].handle.request)
        return self.kv_taken() + wanted <= self._admission.kv_budget_bytes

    @staticmethod
    def _is_over(job: Job) -> bool:
        return job.handle.is_cancelled or job.handle.request.deadline_s <= time.monotonic()

    def _leave(self, job: Job, error: NeapError | None) -> None:
        with self.lock:
            self.running.remove(job)
        self._end(job, error)

    def _end(self, job: Job, error: NeapError | None) -> None:
        """`job` runs no more; its caller is told so."""
        if job.awaited is not None:
            job.awaited.cancel()
        sequence, job.sequence = job.sequence, None
        if sequence is not None:
            try:
                self._decoder.prefixes.keep(sequence)
            except Exception:  # later requests read their prompts themselves
                logger.exception("what a request had read could not be kept")
        if error is not None:
            self._deliver(job, error)
        self._deliver(job, None)

    @staticmethod
    def _deliver(job: Job, event: EngineEvent) -> None:
        try:
            job.handle.deliver(event)
        except BaseException:  # a caller's callback must not stop everybody's engine
            logger.exception("delivering an event of %s failed", job.handle.request.request_id)
            job.handle.cancel()


def _member(job: Job) -> tuple[Sequence, Drafter]:
    assert job.sequence is not None
    assert job.binding is not None
    return job.sequence, job.binding[1]


def stopping() -> Unavailable:
    return Unavailable("the worker is stopping", reason="SHUTTING_DOWN")
