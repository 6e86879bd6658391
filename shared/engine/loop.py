"""The engine's thread. It owns the model, admits requests, steps them together, and ends each of them."""

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial

from shared.engine.background import BackgroundTasks, Slices
from shared.engine.drafting.costs import CostMeter
from shared.engine.drafting.ladder_cache import LadderCache
from shared.engine.drafting.pass_costs import PassCosts
from shared.engine.failure import failure_of
from shared.engine.lifetime import ForkGate, ModelClaim, stop_at_exit
from shared.engine.request.handle import AfterEvents, EngineEvent
from shared.engine.request.job import EngineJob
from shared.engine.request.sequence import DecodingSequence
from shared.engine.scheduler import Scheduler
from shared.engine.step import Decoder
from shared.errors import Cancelled, DeadlineExceeded, NeapError, Unavailable
from shared.ladder.ladder import Ladder

logger = logging.getLogger(__name__)


class _Stopped(Exception):
    """The engine has been asked to stop before it was ready."""


class EngineLoop:
    """Starts its thread when it is created. `lock` guards `scheduler`, `background` and `ended`.

    `cost_meter` measures the costs of passes, and `ladder` is bound, before the loop is ready. `clock` tells when
    deadlines have passed. The thread calls `on_failure` if it ends because of an error. It ends when `request_stop` has
    been called, and no later than the interpreter. Then it releases `claim`.
    """

    def __init__(
        self,
        decoder: Decoder,
        ladders: LadderCache,
        scheduler: Scheduler[EngineJob],
        *,
        ladder: Ladder,
        claim: ModelClaim,
        on_failure: Callable[[], object],
        cost_meter: CostMeter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self.scheduler = scheduler
        self.background = BackgroundTasks()
        self.costs: PassCosts | None = None
        # The error of all later requests, once the thread has ended.
        self.ended: NeapError | None = None
        self.is_ready = threading.Event()
        self.ladder_failure: NeapError | None = None
        # When the thread was ready, by `time.monotonic`: what came before waited for that, and not in the queue.
        self._ready_s = math.inf
        self._decoder = decoder
        self._ladders = ladders
        self._ladders.prepare_drafter = partial(decoder.prepare_drafter, seconds=cost_meter.seconds)
        self._ladders.in_use = lambda: {id(job.ladder) for job in scheduler.running}
        self._on_failure = on_failure
        self._claim = claim
        self._cost_meter = cost_meter
        self._clock = clock
        self._is_stopping = False
        self._after_events: set[AfterEvents] = set()  # of this turn
        # When the thread began what it does now, by `time.monotonic`; None while it waits for work, and before it is
        # ready.
        self.turn_began_s: float | None = None
        self.gate = ForkGate()
        # An entry wakes the thread. A queue, because finalisers may put entries, while a condition's lock could
        # deadlock them.
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(ladder,), name="neap-engine", daemon=True)
        stop_at_exit(self)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._is_stopping or self.ended is not None

    def why_closed(self) -> NeapError:
        return self.ended or stopping_error()

    @property
    def thread_id(self) -> int | None:
        return self._thread.ident

    def wake(self) -> None:
        self._wake_ups.put(None)

    def request_stop(self) -> None:
        """See `Stoppable`."""
        self._is_stopping = self._claim.is_ending = True
        self.wake()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def forget(self) -> None:
        """See `Stoppable`. The parent's thread may have held the lock."""
        self._claim.release()
        self.lock = threading.Lock()
        self.ended = Unavailable("the engine runs in the process that forked this one", reason="FORKED")
        self.scheduler, self.background = Scheduler(self.scheduler.limits), BackgroundTasks()
        self.is_ready = threading.Event()
        self.is_ready.set()

    # From here on: the engine's thread.

    def _run(self, ladder: Ladder) -> None:
        ended = stopping_error()
        self._claim.thread = threading.get_ident()
        try:
            with self.gate:
                self._make_ready(ladder)
            self._ready_s = time.monotonic()
            self.is_ready.set()
            while self._wait_for_work():
                with self.gate:
                    self.turn_began_s = time.monotonic()
                    try:
                        self._run_once()
                        self._end_deliveries()
                    finally:
                        self.turn_began_s = None
        except _Stopped:
            pass
        except BaseException:
            logger.exception("the engine has failed")
            ended = Unavailable("the engine has failed", reason="ENGINE_FAILED")
        with self.lock:
            self.ended = ended
            jobs = self.scheduler.clear()
            self.background.close(ended)
        self.is_ready.set()
        self._claim.release()
        for job in jobs:
            self._end(job, ended)
        self._end_deliveries()
        if ended.reason == "ENGINE_FAILED":
            self._on_failure()

    def _make_ready(self, ladder: Ladder) -> None:
        """Records passes if the runner does so, measures the costs of passes, and binds the engine's own ladder."""
        runner = self._decoder.runner
        self._finish_slices(runner.prepare(()))
        self._finish_slices(self._decoder.prepare(self._cost_meter.seconds))
        self._plan_by(self._cost_meter.measure_passes(runner, between=self._check_stop))
        assert self.costs is not None
        for num_tokens, seconds in self.costs.wide:
            self._decoder.prefill_rate.record(num_tokens, seconds)
        try:
            self._finish_slices(self._ladders.prepare(ladder, self.costs, self_tests=False))
        except _Stopped:
            raise
        except Exception as error:  # requests that need the ladder get this error; others are served
            logger.exception("the engine's own ladder could not be bound")
            self.ladder_failure = failure_of(error)

    def plan_by(self, timings: Generator[None, None, PassCosts]) -> Slices:
        """A task that measures the costs by which later requests are planned."""
        self._plan_by((yield from timings))

    def _plan_by(self, costs: PassCosts) -> None:
        self.costs = self._decoder.statistics.served.costs = costs

    def _finish_slices(self, slices: Iterator[None]) -> None:
        for _ in slices:
            self._check_stop()

    def _check_stop(self) -> None:
        """Between the passes of `_make_ready`: lets a fork happen. Raises `_Stopped`."""
        self.gate.let_fork()
        if self._is_stopping:
            raise _Stopped

    def _wait_for_work(self) -> bool:
        """Blocks until there is work, or until the next deadline. Returns False once the engine is to stop."""
        while not self._is_stopping:
            while not self._wake_ups.empty():
                self._wake_ups.get_nowait()
            with self.lock:
                now = self._clock()
                if self.scheduler.has_work(now) or not self.background.is_empty or self._decoder.is_under_way:
                    return not self._is_stopping
                wait_s = max(self.scheduler.next_deadline_s - now, 0.0)
            timeout_s = None if wait_s >= threading.TIMEOUT_MAX or math.isinf(wait_s) else wait_s
            with suppress(queue.Empty):
                self._wake_ups.get(timeout=timeout_s)
        return False

    def _run_once(self) -> None:
        """Ends cancelled and late requests, admits waiting ones, and steps those whose turn it is; else does background
        work."""
        with self.lock:
            ended = self.scheduler.remove_ended(self._clock())
            self.scheduler.admit()
            put_back = self.scheduler.put_back()
            if put_back:
                self.scheduler.admit()
            turn = self.scheduler.next_turn()
            num_free_tokens = self.scheduler.num_free_kv_tokens
        for job in ended:
            if job.is_cancelled:
                self._end(job, Cancelled("the request was cancelled"))
            else:
                self._end(job, DeadlineExceeded("the deadline passed during generation"))
        for job in put_back:
            self._put_back(job)
        # Caches that are only kept for reuse give way to running requests.
        self._decoder.prefixes.shrink_to(num_free_tokens)
        ready = [job for job in turn if self._is_started(job)]
        if ready or self._decoder.is_under_way:
            self._step(ready)
            self.background.after_step()
        elif not self.background.is_empty:
            self.background.run_slice()

    def _put_back(self, job: EngineJob) -> None:
        job.count_put_back()
        if job.sequence is None:
            return
        try:
            self._decoder.put_back(job.sequence)
        except Exception as error:
            logger.exception("a request could not be put back: %s", job.request.request_id)
            job.sequence = None
            self._remove_and_end(job, failure_of(error))

    def _is_started(self, job: EngineJob) -> bool:
        """Whether the job can be stepped. Starts it if its ladder is bound.
        Otherwise the ladder is bound in the background."""
        if job.sequence is not None and job.sequence.has_cache:
            return True
        assert self.costs is not None
        try:
            if job.sequence is not None:
                self._decoder.readmit(job.sequence)
                return True
            drafter = self._ladders.find(job.ladder, self.costs)
            if drafter is None:
                self._bind_in_background(job)
                return False
            submitted_s = max(job.submitted_s, self._ready_s)
            job.sequence = self._decoder.admit(job.request, drafter, job.on_states, submitted_s, job.answer)
            job.started_s = time.monotonic()
        except Exception as error:
            logger.exception("a request could not be started: %s", job.request.request_id)
            self._remove_and_end(job, failure_of(error))
            return False
        if job.sequence.is_finished:  # the caller had the whole answer, but not its end
            self._finish(job, job.sequence)
            return False
        return True

    def _bind_in_background(self, job: EngineJob) -> None:
        """Raises why the ladder could not be bound, if that has been tried."""
        assert job.ladder is not None
        assert self.costs is not None
        if job.awaited is not None and job.awaited.done():
            job.awaited.result()
        with self.lock:
            if job.awaited is None or job.awaited.done():
                slices = self._ladders.prepare(job.ladder, self.costs, self_tests=False)
                job.awaited = self.background.add(slices)

    def _step(self, jobs: list[EngineJob]) -> None:
        """One decode step for all of `jobs`, or the launch of one.
        Those that are complete or have failed in a step leave."""
        try:
            results = self._decoder.turn([job.sequence for job in jobs if job.sequence is not None])
        except Exception as error:
            # The state of every sequence is unknown.
            ids = ", ".join(job.request.request_id for job in jobs)
            logger.exception("a step failed for %s", ids)
            for failed in jobs:
                failed.sequence = None
                self._remove_and_end(failed, failure_of(error))
            self._decoder.check_model()
            return
        with self.lock:
            # A step that was launched before may have had others, of which some have ended since.
            going = {id(job.sequence): job for job in self.scheduler.running if job.sequence is not None}
        has_failures = False
        for sequence, chunks in results:
            if (job := going.pop(id(sequence), None)) is None:
                continue
            for chunk in chunks:
                self._deliver(job, chunk)
            if sequence.failure is not None:
                has_failures = True
                job.sequence = None  # nothing of its cache may be reused
                self._remove_and_end(job, sequence.failure)
            elif sequence.is_finished:
                self._finish(job, sequence)
        if has_failures:
            self._decoder.check_model()

    def _finish(self, job: EngineJob, sequence: DecodingSequence) -> None:
        try:
            finished = sequence.finished()
        except Exception as error:
            logger.exception("a request could not be closed: %s", sequence.request.request_id)
            self._remove_and_end(job, failure_of(error))
            return
        self._deliver(job, finished)
        self._remove_and_end(job, None)

    def _remove_and_end(self, job: EngineJob, error: NeapError | None) -> None:
        with self.lock:
            self.scheduler.remove(job)
        self._end(job, error)

    def _end(self, job: EngineJob, error: NeapError | None) -> None:
        """Tells the caller that `job` has ended, and keeps its cache for reuse."""
        if job.awaited is not None:
            job.awaited.cancel()
        sequence, job.sequence = job.sequence, None
        if sequence is not None:
            try:
                self._decoder.prefixes.insert(sequence)
            except Exception:  # later requests compute their prompts themselves
                logger.exception("the cache of a request could not be kept")
        self._ladders.evict_unused()
        if error is not None:
            self._deliver(job, error)
        self._deliver(job, None)

    def _deliver(self, job: EngineJob, event: EngineEvent) -> None:
        if job.after_events is not None:
            self._after_events.add(job.after_events)
        try:
            job.deliver(event)
        except BaseException:  # a caller's callback must not stop the engine
            logger.exception("delivering an event of %s failed", job.request.request_id)
            job.cancel()

    def _end_deliveries(self) -> None:
        try:
            while self._after_events:
                self._after_events.pop()()
        except BaseException:  # as above
            logger.exception("what follows the events of a step failed")


def stopping_error() -> Unavailable:
    return Unavailable("the engine is closed", reason="SHUTTING_DOWN")
