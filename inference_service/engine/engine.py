"""The engine: one thread that owns the model. Requests join and leave between its steps."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inference_service.engine.admission import Admission
from inference_service.engine.bindings import Bindings
from inference_service.engine.chores import Chores
from inference_service.engine.costs import measure_deep, measure_wide
from inference_service.engine.decoder import Decoder
from inference_service.engine.drafting import Drafter
from inference_service.engine.handle import EngineEvent, GenerationHandle, OnEvent
from inference_service.engine.memory import default_budget, slot_bytes
from inference_service.engine.planner import PassCosts
from inference_service.engine.prefixes import Prefixes, common_prefix
from inference_service.engine.prompt import Prompt, encode_prompt
from inference_service.engine.request import (
    Finished,
    GeneratedToken,
    Generation,
    GenerationRequest,
    StoppingParams,
)
from inference_service.engine.sequence import Sequence
from inference_service.engine.shadow import Shadow
from shared.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    NeapError,
    Unavailable,
)
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.load import LoadedModel
from shared.model.own_thread import in_own_thread
from shared.model.runner import DepthRunner
from shared.model.runners import make_runner
from shared.model.sampling import SamplingParams

logger = logging.getLogger(__name__)

# Unless told otherwise, requests that are stepped together, each with its own KV cache; more wait.
MAX_RUNNING = 16
# Of the budget for keys and values, what ended requests may keep for later ones that start alike.
PREFIX_SHARE = 0.25
RETRY_AFTER_S = 1.0


@dataclass
class _Job:
    handle: GenerationHandle
    ladder: Ladder | None
    sequence: Sequence | None = None


class Engine:
    """Generates for one model. All methods are thread-safe; up to `max_running` requests share each step, taken in the order they came.

    `ladder` is used for requests that bring none of their own. `kv_budget_bytes` bounds the keys and values of all running
    requests together; None: half of what is free. A request takes its share, its prompt and its longest answer, before it
    starts, and waits until there is room. `prefix_cache_bytes` of that budget, None: a quarter, keep what ended requests
    have computed for others that start alike, as long as nobody needs the room; 0: nothing is shared. `max_queue` bounds the
    requests that wait, `max_queue_tokens` their prompts. `shadow_share` of the answers by policy relaxed are checked in idle time:
    see `Shadow`. `on_failure` is called by the engine's thread should it ever end by
    itself; every later request is refused with `Unavailable`. `runner_of` makes what runs the model, given its bytes for keys and
    values.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ladder: Ladder | None = None,
        *,
        max_running: int = MAX_RUNNING,
        max_queue: int = 64,
        max_queue_tokens: int = 1 << 18,
        kv_budget_bytes: int | None = None,
        prefix_cache_bytes: int | None = None,
        shadow_share: float = 0.0,
        on_failure: Callable[[], object] = lambda: None,
        runner_of: Callable[[LoadedModel, int], DepthRunner] = make_runner,
    ) -> None:
        if ladder is not None:
            ladder.check_model(loaded)
        self.loaded = loaded
        self._ladder = ladder
        self._max_running = max_running
        self._max_queue, self._max_queue_tokens = max_queue, max_queue_tokens
        self._on_failure = on_failure
        if kv_budget_bytes is None:
            kv_budget_bytes = default_budget(loaded.device)
        runner = in_own_thread(runner_of, loaded, kv_budget_bytes)
        kv_budget_bytes = runner.usable_bytes(kv_budget_bytes)
        if prefix_cache_bytes is None:
            prefix_cache_bytes = int(PREFIX_SHARE * kv_budget_bytes)
        bytes_per_slot = in_own_thread(slot_bytes, runner)
        self._admission = Admission(loaded, bytes_per_slot, kv_budget_bytes, runner.page_slots)
        self._decoder = Decoder(runner, Prefixes(prefix_cache_bytes // bytes_per_slot))
        self.statistics = self._decoder.statistics
        self.shadow = Shadow(runner, self._decoder.prefixes, share=shadow_share)
        self._bindings = Bindings(runner)
        self._chores = Chores()
        self._costs: PassCosts | None = None
        self._waiting: deque[_Job] = deque()
        self._running: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._warm = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neap-engine", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def kv_usage_ratio(self) -> float:
        """Share of the KV budget that the requests taken up hold, in [0, 1]."""
        with self._changed:
            return self._kv_taken() / max(self._admission.kv_budget_bytes, 1)

    def warm_up(self) -> None:
        """Returns once the passes' costs are measured; the first request would otherwise wait for that."""
        while not self._warm.wait(timeout=0.1):
            if not self._thread.is_alive():
                raise Unavailable("the engine has stopped")

    def prepare(self, ladder: Ladder) -> None:
        """Binds and tests a ladder beside those in use, between the steps of what runs; then its first request need not wait.

        Blocks until that is done. Raises `RouterMismatch`, `Corrupt` (reason SELF_TEST_FAILED), `Unavailable` once closed.
        """
        ladder.check_model(self.loaded)
        self.warm_up()
        assert self._costs is not None
        with self._changed:
            if self._closing:
                raise _stopping()
            done = self._chores.add(self._bindings.prepare(ladder, self._costs))
            self._changed.notify_all()
        done.result()

    def submit(
        self,
        request: GenerationRequest,
        ladder: Ladder | None = None,
        *,
        on_event: OnEvent | None = None,
    ) -> GenerationHandle:
        """Queues a request after checking it against the model.

        Raises `InvalidInput`, `PromptTooLong`, `PreconditionFailed` (reason ROUTER_REQUIRED), `RouterMismatch`,
        `DeadlineExceeded`, `Exhausted` (reasons QUEUE_FULL and KV_BUDGET) and `Unavailable` once closed.
        """
        ladder = ladder or self._ladder
        self._admission.check(request, ladder, lambda: self._num_known(request.prompt_ids))
        handle = GenerationHandle(request, self._wake, on_event)
        with self._changed:
            if self._closing:
                raise _stopping()
            tokens = sum(len(job.handle.request.prompt_ids) for job in self._waiting)
            if len(self._waiting) >= self._max_queue or (
                self._waiting and tokens + len(request.prompt_ids) > self._max_queue_tokens
            ):
                raise Exhausted(
                    f"{len(self._waiting)} requests with prompts of {tokens} tokens are waiting already",
                    reason="QUEUE_FULL",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._waiting.append(_Job(handle, ladder))
            self._changed.notify_all()
        return handle

    def generate(
        self,
        prompt: Prompt,
        *,
        policy: DepthPolicy | str = "exact",
        sampling: SamplingParams | None = None,
        logprobs: int | None = None,
        **stopping: Any,
    ) -> Generation:
        """Generates in one call. `prompt` is text, token ids or chat messages; `stopping` as in `StoppingParams`."""
        request = GenerationRequest(
            prompt_ids=encode_prompt(self.loaded, prompt),
            sampling=sampling or SamplingParams(),
            stopping=StoppingParams(**stopping),
            policy=DepthPolicy(policy) if isinstance(policy, str) else policy,  # type: ignore[arg-type]
            logprobs=logprobs,
        )
        text = ""
        tokens: list[GeneratedToken] = []
        for event in self.submit(request).events():
            text += event.text
            if isinstance(event, Finished):
                return Generation(text, tuple(tokens), event)
            tokens += event.tokens
        raise Unavailable("the generation ended without a result")

    def close(self) -> None:
        """Stops after the current step; what is queued or running ends with `Unavailable`. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _num_known(self, prompt: tuple[int, ...]) -> int:
        """Tokens at the start of `prompt` that somebody else has read, or will have read by then."""
        prefixes = self._decoder.prefixes
        if not prefixes.is_open:
            return 0
        with self._changed:
            jobs = [*self._running, *self._waiting]
        others = [common_prefix(prompt, job.handle.request.prompt_ids) for job in jobs]
        return max(prefixes.longest(prompt), *others, 0)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            for _ in self._decoder.runner.prepare(()):
                pass
            deep = measure_deep(self._decoder.runner)
            self._costs = PassCosts(deep, wide=measure_wide(self._decoder.runner, deep))
            self._admission.costs = self._costs
            if self._ladder is not None:
                self._bindings.get(self._ladder, self._costs)
            self._warm.set()
            while self._wait_for_work():
                self._turn()
        except Exception:
            logger.exception("the engine has failed")
            self._on_failure()
        finally:
            with self._changed:
                self._closing = True
                jobs = [*self._running, *self._waiting]
                self._running.clear()
                self._waiting.clear()
                self._chores.close(_stopping())
            for job in jobs:
                self._end(job, _stopping())

    def _wait_for_work(self) -> bool:
        """False once the engine is to stop. Wakes for deadlines, too: a paused request may run into its own."""
        with self._changed:
            while not self._closing:
                jobs = [*self._running, *self._waiting]
                if self._waiting and self._has_room():
                    return True
                if any(not job.handle.is_paused for job in self._running):
                    return True
                if not (self._chores.is_empty and self.shadow.is_idle):
                    return True
                if any(self._is_over(job) for job in jobs):
                    return True
                deadline = min((job.handle.request.deadline_s for job in jobs), default=None)
                wait_s = None if deadline is None else deadline - time.monotonic()
                self._changed.wait(
                    wait_s if wait_s is None or wait_s < threading.TIMEOUT_MAX else None
                )
        return False

    def _turn(self) -> None:
        """Lets go of what is over, takes in what waits, and steps all requests that are not paused."""
        with self._changed:
            over = [job for job in (*self._running, *self._waiting) if self._is_over(job)]
            for job in over:
                (self._running if job in self._running else self._waiting).remove(job)
            while self._waiting and self._has_room():
                self._running.append(self._waiting.popleft())
            taken = self._kv_taken()
            ready = [job for job in self._running if not job.handle.is_paused]
        for job in over:
            if job.handle.is_cancelled:
                self._end(job, Cancelled("the request was cancelled"))
            else:
                self._end(job, DeadlineExceeded("the deadline passed during generation"))
        # What is kept for later makes room for what runs now.
        num_slots = (self._admission.kv_budget_bytes - taken) // self._admission.slot_bytes
        self.shadow.make_room(num_slots)
        self._decoder.prefixes.fit(num_slots - self.shadow.num_slots)
        if not ready:
            if not self._chores.is_empty:
                self._chores.slice()
            elif not self.shadow.is_idle:
                self.shadow.slice(num_slots)
            return
        try:
            self._step(ready)
            self._chores.after_step()
        except Exception as error:
            # The pass was shared, so nobody's state can be trusted any more.
            ids = ", ".join(job.handle.request.request_id for job in ready)
            logger.exception("a step failed for %s", ids)
            failure = (
                error
                if isinstance(error, NeapError)
                else NeapError("the request failed inside the engine")
            )
            for job in ready:
                self._leave(job)
                job.sequence = None
                self._end(job, failure)

    def _step(self, jobs: list[_Job]) -> None:
        """One step for all of `jobs`; those that are complete leave."""
        assert self._costs is not None
        batch: list[tuple[Sequence, Drafter]] = []
        for job in jobs:
            bound, drafter = self._bindings.get(job.ladder, self._costs)
            if job.sequence is None:
                request = job.handle.request
                job.sequence = self._decoder.start(request, bound, drafter.served(request))
                job.sequence.submitted_s = job.handle.submitted_s
                job.handle.started_s = time.monotonic()
            batch.append((job.sequence, drafter))
        self._bindings.fit({id(job.ladder) for job in jobs})
        results = self._decoder.step(batch, self._costs)
        for job, (sequence, _), chunks in zip(jobs, batch, results, strict=True):
            for chunk in chunks:
                self._deliver(job, chunk)
            if sequence.is_finished:
                self._deliver(job, sequence.finished())
                budget = self._admission.kv_budget_bytes // self._admission.slot_bytes
                self.shadow.offer(sequence, budget)
                self._leave(job)
                self._end(job, None)

    def _has_room(self) -> bool:
        """Whether the first that waits may start. The later ones wait behind it, so that no large request starves.

        A paused request keeps its cache but not its turn: clients that stop reading must not stop the others.
        """
        if sum(not job.handle.is_paused for job in self._running) >= self._max_running:
            return False
        wanted = self._admission.kv_bytes(self._waiting[0].handle.request)
        return self._kv_taken() + wanted <= self._admission.kv_budget_bytes

    def _kv_taken(self) -> int:
        return sum(self._admission.kv_bytes(job.handle.request) for job in self._running)

    @staticmethod
    def _is_over(job: _Job) -> bool:
        return job.handle.is_cancelled or job.handle.request.deadline_s <= time.monotonic()

    def _leave(self, job: _Job) -> None:
        with self._changed:
            self._running.remove(job)

    def _end(self, job: _Job, error: NeapError | None) -> None:
        if job.sequence is not None:
            self._decoder.prefixes.keep(job.sequence)
            job.sequence = None  # its KV cache is the prefixes' from now on, or free
        if error is not None:
            self._deliver(job, error)
        self._deliver(job, None)

    @staticmethod
    def _deliver(job: _Job, event: EngineEvent) -> None:
        try:
            job.handle.deliver(event)
        except Exception:  # a caller's callback must not stop everybody's engine
            logger.exception("delivering an event of %s failed", job.handle.request.request_id)
            job.handle.cancel()


def _stopping() -> Unavailable:
    return Unavailable("the worker is stopping", reason="SHUTTING_DOWN")
