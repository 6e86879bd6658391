"""Observes one Generate call: its metrics, its log line, its spans."""

import math
import time
from types import TracebackType

from inference_service.metrics import WorkerMetrics
from shared.engine.request.handle import GenerationHandle
from shared.engine.request.request import Finished, GenerationEvent
from shared.errors import NeapError
from shared.rpc.interceptors import CLIENT_GONE, annotate_call
from shared.rpc.tracing import record_span


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

    def set_model(self, model_id: str, deadline_s: float) -> None:
        """The call names a model that is served here. `deadline_s` in `time.monotonic()` seconds."""
        self._model_id, self._deadline_s = model_id, deadline_s
        annotate_call(model_id=model_id, router_version=0)  # 0 means no router

    def set_router(self, version: int, *, by_default: bool) -> None:
        """The call uses this router version. `by_default`: the caller named none."""
        if by_default:
            self._metrics.router_version.labels(self._model_id).set(version)
        annotate_call(router_version=version)

    def set_handle(self, handle: GenerationHandle) -> None:
        """The engine has accepted the request."""
        self._handle = handle
        annotate_call(prompt_tokens=len(handle.request.prompt_ids))
        if handle.request.resumed_ids:
            self._metrics.requests_resumed.labels(self._model_id).inc()
            annotate_call(resumed_tokens=len(handle.request.resumed_ids))

    def record_event(self, event: GenerationEvent) -> None:
        """`event` is about to be written to the client."""
        if isinstance(event, Finished):
            self._finished = event
            return
        self._num_tokens += len(event.tokens)
        if self._first_token_s is None and event.tokens:
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
        elif self._handle is None and isinstance(error, NeapError):
            self._metrics.requests_rejected.labels(self._model_id, error.reason).inc()
        else:
            self._metrics.request_failures.labels(self._model_id, self._failure_reason(error, now)).inc()
        if self._handle is not None:
            done = self._finished
            annotate_call(generated_tokens=done.num_completion_tokens if done else self._num_tokens)
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
