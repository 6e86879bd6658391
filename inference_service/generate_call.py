"""Observes one Generate call: its metrics, its log line, its spans."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from inference_service.metrics import WorkerMetrics
from shared.engine.request.handle import GenerationHandle
from shared.engine.request.request import Finished, GenerationEvent, TokenChunk
from shared.errors import DeadlineExceeded, NeapError
from shared.rpc.interceptors import CLIENT_GONE, annotate_call
from shared.rpc.tracing import record_span, set_gen_ai

# Fields of SamplingParams that OpenTelemetry names. A seed does not fit its numbers, and stop strings are content.
GEN_AI_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")


class GenerateCall:
    """A context manager around one call, in one task of the event loop. Its methods report the call's progress.

    Every call counts once: as a success, a rejection (the engine did not accept it) or a failure.
    """

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._arrived_s = time.monotonic()
        self._deadline_s = math.inf
        self._model_id = ""  # empty for models that are not served: clients must not choose the text of a label
        self._handle: GenerationHandle | None = None
        self._first_token_s: float | None = None
        self._num_tokens = 0
        self._finished: Finished | None = None

    def __enter__(self) -> "GenerateCall":
        return self

    def set_model(self, model_id: str, deadline_s: float, *, is_chat: bool = False) -> None:
        """The call names a model that is served here. `deadline_s` in `time.monotonic()` seconds."""
        self._model_id, self._deadline_s = model_id, deadline_s
        annotate_call(model_id=model_id, router_version=0)  # 0 means no router
        operation = "chat" if is_chat else "text_completion"
        set_gen_ai({"operation.name": operation, "provider.name": "neap", "request.model": model_id})

    def set_router(self, version: int, *, by_default: bool) -> None:
        """The call uses this router version. `by_default`: the caller named none."""
        if by_default:
            self._metrics.router_version.labels(self._model_id).set(version)
        annotate_call(router_version=version)

    def set_handle(self, handle: GenerationHandle) -> None:
        """The engine has accepted the request."""
        self._handle = handle
        annotate_call(prompt_tokens=len(handle.request.prompt_ids))
        set_gen_ai({f"request.{name}": getattr(handle.request.sampling, name) for name in GEN_AI_SAMPLING})
        set_gen_ai({"request.max_tokens": handle.request.stopping.max_tokens})
        set_gen_ai({"response.id": handle.request.request_id, "response.model": self._model_id})
        if handle.request.resumed_ids:
            self._metrics.requests_resumed.labels(self._model_id).inc()
            annotate_call(resumed_tokens=len(handle.request.resumed_ids))

    def record_event(self, event: GenerationEvent) -> None:
        """`event` is about to be written to the client."""
        if isinstance(event, Finished):
            self._finished = event
            return
        self._num_tokens += len(event.token_ids)
        if self._first_token_s is None and event.token_ids:
            self._first_token_s = time.monotonic()
            ttft_s = self._first_token_s - self._arrived_s
            self._metrics.time_to_first_token.labels(self._model_id).observe(ttft_s)
            annotate_call(ttft_s=round(ttft_s, 6))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = time.monotonic()
        if error is None and self._finished is not None:
            reason = self._finished.reason.value
            self._metrics.request_success.labels(self._model_id, reason).inc()
            self._metrics.e2e_request_latency.labels(self._model_id).observe(now - self._arrived_s)
            annotate_call(finish_reason=reason)
            set_gen_ai({"response.finish_reasons": ["length" if reason == "length" else "stop"]})
        elif self._handle is None and isinstance(error, NeapError):
            self._metrics.requests_rejected.labels(self._model_id, error.reason).inc()
        else:
            self._metrics.request_failures.labels(self._model_id, self._failure_reason(error, now)).inc()
        if self._handle is not None:
            done = self._finished
            num_generated = done.num_completion_tokens if done else self._num_tokens
            annotate_call(generated_tokens=num_generated)
            num_prompt = len(self._handle.request.prompt_ids)
            set_gen_ai({"usage.input_tokens": num_prompt, "usage.output_tokens": num_generated})
            set_gen_ai({"usage.cache_read.input_tokens": done.num_cached_tokens if done else None})
            self._record_phases(self._handle, now)

    def _failure_reason(self, error: BaseException | None, now: float) -> str:
        if isinstance(error, NeapError):
            return error.reason
        if isinstance(error, CLIENT_GONE):
            # A passed deadline and a cancellation raise the same exception.
            return "DEADLINE_EXCEEDED" if now >= self._deadline_s else "CANCELLED"
        return "INTERNAL"

    def _record_phases(self, handle: GenerationHandle, now: float) -> None:
        """Records a span for each phase that the request reached. The last one ends with the call."""
        started_s = handle.started_s
        record_span("queue", handle.submitted_s, now if started_s is None else started_s)
        if started_s is None:
            return
        record_span("prefill", started_s, now if self._first_token_s is None else self._first_token_s)
        if self._first_token_s is not None:
            record_span("decode", self._first_token_s, now)


def deadline_s_of(context: Any) -> float:
    """The call's deadline in `time.monotonic()` seconds. Raises DeadlineExceeded when it has passed."""
    remaining_s: float | None = context.time_remaining()
    if remaining_s is None:
        return math.inf
    if remaining_s <= 0:
        raise DeadlineExceeded("the deadline had passed before the work began")
    return time.monotonic() + remaining_s


class Pausable(Protocol):
    """The part of a GenerationHandle that the stream uses. All methods are thread-safe and idempotent."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def cancel(self) -> None: ...


class Wakeups:
    """Tells the readers of an event loop that events have arrived, all of them by one call of `wake`.

    To wake the loop is a system call during which another thread takes the interpreter. For each token of each request
    it took a quarter of the engine's thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: deque[EventStream] = deque()

    def add(self, stream: "EventStream") -> None:
        """The stream is to be woken. Any thread may call it."""
        self._due.append(stream)

    def wake(self) -> None:
        """Any thread may call it."""
        try:
            self._loop.call_soon_threadsafe(self._each, EventStream.arrive)
        except RuntimeError:  # the loop is closed, so nothing can read the events
            self._each(EventStream.close)

    def _each(self, work: Callable[["EventStream"], None]) -> None:
        while self._due:
            work(self._due.popleft())


class EventStream:
    """`push` is the engine's callback; the reader learns of it by `wakeups`, whose loop alone may call `next`.

    The request is paused when `capacity` events wait, and resumed when half of them are read. So a client that does not
    read delays no other client, and its events take bounded memory. `close` cancels the request, even if it is attached
    later.
    """

    def __init__(self, wakeups: Wakeups, *, capacity: int = 32) -> None:
        self.wakeups = wakeups
        self._capacity = capacity
        self._lock = threading.Lock()
        self._events: deque[GenerationEvent | NeapError | None] = deque()
        self._arrived = asyncio.Event()
        self._handle: Pausable | None = None
        self._paused = False
        self._closed = False

    def attach(self, handle: Pausable) -> None:
        """Sets the handle of the request. Events may have arrived before."""
        with self._lock:
            self._handle = handle
            self._pause_if_full()
            closed = self._closed
        if closed:
            handle.cancel()

    def push(self, event: GenerationEvent | NeapError | None) -> None:
        """Adds an event, an error that ends the stream, or None at the end. Never waits for the reader.
        Any thread may call it."""
        with self._lock:
            if self._closed:
                return
            self._events.append(event)
            self._pause_if_full()
        self.wakeups.add(self)

    def arrive(self) -> None:
        """Lets the reader look. Only on its loop."""
        self._arrived.set()

    def _pause_if_full(self) -> None:
        # Under the lock, like resuming. Otherwise a pause could follow a later resume and never end.
        if self._handle is not None and not self._paused and len(self._events) >= self._capacity:
            self._paused = True
            self._handle.pause()

    async def next(self) -> GenerationEvent | None:
        """Returns the next event, all chunks that have arrived as one, or None at the end. Raises the NeapError that
        the engine reported."""
        while True:
            with self._lock:
                if self._events:
                    event = _first(self._events)
                    if self._paused and len(self._events) <= self._capacity // 2:
                        assert self._handle is not None
                        self._paused = False
                        self._handle.resume()
                    break
                self._arrived.clear()
            await self._arrived.wait()
        if isinstance(event, NeapError):
            raise event
        return event

    def close(self) -> None:
        """Drops all events and cancels the request. Idempotent."""
        with self._lock:
            self._closed = True
            self._events.clear()
            handle = self._handle
        if handle is not None:
            handle.cancel()


def _first(events: deque[GenerationEvent | NeapError | None]) -> GenerationEvent | NeapError | None:
    """Takes the first event, and all chunks of the answer that follow one, joined: a loop that is behind sends fewer
    and larger messages."""
    event = events.popleft()
    chunks = []
    while isinstance(event, TokenChunk) and not event.prompt:
        chunks.append(event)
        if not events or not isinstance(events[0], TokenChunk) or events[0].prompt:
            return TokenChunk.joined(chunks)
        event = events.popleft()
    return event
