"""One Generate call as those who run the worker see it: its metrics, its line in the log, its spans."""

import math
import time
from types import TracebackType

from inference_service.engine.request.handle import GenerationHandle
from inference_service.engine.request.request import Finished, GenerationEvent
from inference_service.metrics import WorkerMetrics
from shared.errors import NeapError
from shared.rpc.interceptors import CLIENT_GONE, annotate_call
from shared.rpc.tracing import record_span


class GenerateCall:
    """Entered when the call arrives, told what happens, and left when it ends, in one task of the event loop.

    Every call counts once: as a success, a rejection (the engine never had it) or a failure.
    """

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._arrived_s = time.monotonic()
        self._deadline_s = math.inf
        self._model_id = (
            ""  # stays so for models that are not served: a label must not be a stranger's text
        )
        self._handle: GenerationHandle | None = None
        self._first_token_s: float | None = None
        self._num_tokens = 0
        self._finished: Finished | None = None

    def __enter__(self) -> "GenerateCall":
        return self

    def found(self, model_id: str, deadline_s: float) -> None:
        """The call is for a model that is served here. `deadline_s` in `time.monotonic()` seconds."""
        self._model_id, self._deadline_s = model_id, deadline_s
        annotate_call(model_id=model_id, router_version=0)  # until `routed`: none is needed

    def routed(self, version: int, *, by_default: bool) -> None:
        """It uses this router; `by_default`: the caller named none."""
        if by_default:
            self._metrics.router_version.labels(self._model_id).set(version)
        annotate_call(router_version=version)

    def accepted(self, handle: GenerationHandle) -> None:
        """The engine has it."""
        self._handle = handle
        annotate_call(prompt_tokens=len(handle.request.prompt_ids))

    def event(self, event: GenerationEvent) -> None:
        """`event` goes to the client next."""
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
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
            self._metrics.request_failures.labels(self._model_id, self._why(error, now)).inc()
        if self._handle is not None:
            done = self._finished
            annotate_call(generated_tokens=done.num_completion_tokens if done else self._num_tokens)
            self._record_phases(self._handle, now)

    def _why(self, error: BaseException | None, now: float) -> str:
        if isinstance(error, NeapError):
            return error.reason
        if isinstance(error, CLIENT_GONE):
            # Both arrive so.
            return "DEADLINE_EXCEEDED" if now >= self._deadline_s else "CANCELLED"
        return "INTERNAL"

    def _record_phases(self, handle: GenerationHandle, now: float) -> None:
        """Spans of the phases the request came to; the last of them ends with the call."""
        started_s = handle.started_s
        record_span("queue", handle.submitted_s, now if started_s is None else started_s)
        if started_s is None:
            return
        record_span(
            "prefill", started_s, now if self._first_token_s is None else self._first_token_s
        )
        if self._first_token_s is not None:
            record_span("decode", self._first_token_s, now)
