"""A small synchronous client of neap's services, for the command line and for scripts.

Every method raises NeapError as the service raised it (`shared.rpc.status.from_rpc_error`). On UNAVAILABLE the client repeats only
calls that are safe to repeat: unary calls that change nothing or are idempotent by id, generations that have returned no token yet,
and streams whose first message carries the whole state.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from neap.calibration.v1 import calibration_pb2, calibration_pb2_grpc
from neap.inference.v1 import inference_pb2, inference_pb2_grpc
from neap.router.v1 import router_pb2, router_pb2_grpc

from shared.errors import Unavailable
from shared.rpc.channel import ClientSecurity, open_channel
from shared.rpc.generation import GenerationStream
from shared.rpc.interceptors import REQUEST_ID_KEY
from shared.rpc.retry import is_unavailable, retrying
from shared.rpc.serving import MAX_MESSAGE_BYTES
from shared.rpc.status import from_rpc_error
from shared.rpc.tracing import MetadataSender, trace_context

T = TypeVar("T")

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # gRPC repeats only calls that the server has never begun, as when its connection ends by age. This module decides about all
    # others, call by call.
    ("grpc.enable_retries", 1),
    # A restarted service is found within this time.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Detects a service that hangs or whose machine is gone, because it does not close its connections.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class NeapClient:
    """A client of one target, which may be a worker, a calibrator, or both. Thread-safe.

    `target` is HOST:PORT or any other form that gRPC accepts. Calls are shared in turn among all addresses of a name, or of a list
    such as "ipv4:10.0.0.7:7071,10.0.0.8:7071"; addresses that do not answer are left out. `timeout_s` is the deadline of every unary call. `num_attempts` includes the first attempt. Without
    `security` the connection is plain text and has no token. Raises InvalidInput as `open_channel` does.
    """

    def __init__(
        self,
        target: str,
        *,
        security: ClientSecurity | None = None,
        timeout_s: float = 30.0,
        num_attempts: int = 4,
    ) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._num_attempts = num_attempts
        channel = open_channel(target, security or ClientSecurity(), CHANNEL_OPTIONS)
        self._channel = grpc.intercept_channel(channel, MetadataSender(trace_context))
        # The generated stubs are untyped.
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        self._inference: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._calibration: Any = calibration_pb2_grpc.CalibrationServiceStub(self._channel)
        self._router: Any = router_pb2_grpc.RouterServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "NeapClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_serving(self, service: str = "") -> bool:
        """Return whether the health check of `service` ("" for the whole server) says SERVING. Raises Unavailable without an answer."""
        request = health_pb2.HealthCheckRequest(service=service)
        reply = _called(lambda: self._health.Check(request, timeout=self._timeout_s))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_ready(self, service: str = "", *, timeout_s: float = 60.0) -> None:
        """Wait until `service` is SERVING. Raises Unavailable (reason NOT_READY) after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                if self.is_serving(service):
                    return
            except Unavailable:
                pass
            if time.monotonic() >= deadline_s:
                raise Unavailable(
                    f"{self.target} is not serving after {timeout_s:g} s", reason="NOT_READY"
                )
            time.sleep(0.1)

    # inference

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> GenerationStream:
        """Stream Started, token chunks and Finished. `timeout_s` is the deadline of the whole stream.

        The call is repeated only before the first token: see GenerationStream. A repeated call has the same `request_id`, so it gets
        the same version from an alias with a canary. None makes a new id.
        """
        metadata = ((REQUEST_ID_KEY, request_id or secrets.token_hex(8)),)
        return GenerationStream(
            lambda left_s: self._inference.Generate(request, timeout=left_s, metadata=metadata),
            num_attempts=self._num_attempts,
            timeout_s=timeout_s,
        )

    def get_model(self, model_id: str) -> inference_pb2.Model:
        request = inference_pb2.GetModelRequest(model_id=model_id)
        reply: inference_pb2.GetModelResponse = self._unary(self._inference.GetModel, request)
        return reply.model

    def list_models(self) -> list[inference_pb2.Model]:
        request = inference_pb2.ListModelsRequest()
        reply: inference_pb2.ListModelsResponse = self._unary(self._inference.ListModels, request)
        return list(reply.models)

    # calibration

    def create_calibration(
        self, spec: calibration_pb2.CalibrationSpec, *, request_id: str
    ) -> calibration_pb2.Calibration:
        """Create a job. Idempotent by `request_id`."""
        request = calibration_pb2.CreateCalibrationRequest(request_id=request_id, spec=spec)
        reply: calibration_pb2.CreateCalibrationResponse = self._unary(
            self._calibration.CreateCalibration, request
        )
        return reply.calibration

    def get_calibration(self, calibration_id: str) -> calibration_pb2.Calibration:
        request = calibration_pb2.GetCalibrationRequest(calibration_id=calibration_id)
        reply: calibration_pb2.GetCalibrationResponse = self._unary(
            self._calibration.GetCalibration, request
        )
        return reply.calibration

    def list_calibrations(
        self,
        model_id: str = "",
        *,
        on_unreadable: Callable[[calibration_pb2.UnreadableCalibration], object] = lambda record: (
            None
        ),
    ) -> Iterator[calibration_pb2.Calibration]:
        """Iterate over jobs, newest first, page by page. An empty `model_id` means all models.

        `on_unreadable` is called for each job of a page whose record the service cannot read.
        """
        request = calibration_pb2.ListCalibrationsRequest(model_id=model_id)
        for reply in self._pages(self._calibration.ListCalibrations, request):
            for record in reply.unreadable:
                on_unreadable(record)
            yield from reply.calibrations

    def cancel_calibration(self, calibration_id: str) -> calibration_pb2.Calibration:
        request = calibration_pb2.CancelCalibrationRequest(calibration_id=calibration_id)
        reply: calibration_pb2.CancelCalibrationResponse = self._unary(
            self._calibration.CancelCalibration, request
        )
        return reply.calibration

    def watch_calibration(self, calibration_id: str) -> Iterator[calibration_pb2.Calibration]:
        """Yield the job now and after every change until it ends. Watching resumes after a lost connection."""
        request = calibration_pb2.WatchCalibrationRequest(calibration_id=calibration_id)
        while True:
            first, call = self._retrying(
                lambda: _opened(self._calibration.WatchCalibration(request))
            )
            try:
                for reply in _stream(first, call):
                    yield reply.calibration
                return
            except Unavailable:
                # The first message of a watch carries the whole state, so a repeated call loses nothing.
                continue

    # routers

    def list_versions(self, model_id: str) -> Iterator[router_pb2.RouterVersion]:
        """Iterate over the versions, newest first, page by page, without the manifests."""
        request = router_pb2.ListVersionsRequest(model_id=model_id)
        for reply in self._pages(self._router.ListVersions, request):
            yield from reply.versions

    def get_version(
        self, model_id: str, *, version: int | None = None, alias: str | None = None
    ) -> router_pb2.RouterVersion:
        """Return one version, selected by exactly one of `version` and `alias`."""
        request = router_pb2.GetVersionRequest(model_id=model_id, version=version, alias=alias)
        reply: router_pb2.GetVersionResponse = self._unary(self._router.GetVersion, request)
        return reply.version

    def list_aliases(self, model_id: str) -> list[router_pb2.Alias]:
        """Return the aliases in alphabetical order."""
        request = router_pb2.ListAliasesRequest(model_id=model_id)
        reply: router_pb2.ListAliasesResponse = self._unary(self._router.ListAliases, request)
        return list(reply.aliases)

    def set_alias(
        self,
        model_id: str,
        alias: str,
        version: int,
        *,
        expected_version: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> router_pb2.AliasChange:
        """Point an alias at a version. With `expected_version` this is a compare-and-swap.

        Never repeated, because after a lost answer the repeated call would fail as if another caller had changed the alias.
        """
        request = router_pb2.SetAliasRequest(
            model_id=model_id,
            alias=alias,
            version=version,
            expected_version=expected_version,
            actor=actor,
            reason=reason,
        )
        reply: router_pb2.SetAliasResponse = self._once(self._router.SetAlias, request)
        return reply.change

    def set_canary(self, request: router_pb2.SetCanaryRequest) -> router_pb2.AliasChange:
        """Set or end a canary. Never repeated, for the reason given for `set_alias`."""
        reply: router_pb2.SetCanaryResponse = self._once(self._router.SetCanary, request)
        return reply.change

    def promote_canary(self, request: router_pb2.PromoteCanaryRequest) -> router_pb2.AliasChange:
        """Promote a canary. Never repeated, because after a lost answer the repeated call would find no canary."""
        reply: router_pb2.PromoteCanaryResponse = self._once(self._router.PromoteCanary, request)
        return reply.change

    def rollback_alias(
        self,
        model_id: str,
        alias: str,
        *,
        expected_version: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> router_pb2.AliasChange:
        """Undo the last change of an alias. Never repeated, because the repeated call would undo another change."""
        request = router_pb2.RollbackAliasRequest(
            model_id=model_id,
            alias=alias,
            expected_version=expected_version,
            actor=actor,
            reason=reason,
        )
        reply: router_pb2.RollbackAliasResponse = self._once(self._router.RollbackAlias, request)
        return reply.change

    def alias_history(self, model_id: str, alias: str) -> list[router_pb2.AliasChange]:
        """Return the changes of an alias, newest first."""
        request = router_pb2.GetAliasHistoryRequest(model_id=model_id, alias=alias)
        reply: router_pb2.GetAliasHistoryResponse = self._unary(
            self._router.GetAliasHistory, request
        )
        return list(reply.changes)

    def _unary(self, method: Any, request: Any) -> Any:
        return self._retrying(lambda: method(request, timeout=self._timeout_s))

    def _pages(self, method: Any, request: Any) -> Iterator[Any]:
        """Yield the reply to `request` and those with the pages after it."""
        while True:
            reply = self._unary(method, request)
            yield reply
            if not reply.next_page_token:
                return
            request.page_token = reply.next_page_token

    def _once(self, method: Any, request: Any) -> Any:
        return _called(lambda: method(request, timeout=self._timeout_s))

    def _retrying(self, call: Callable[[], T]) -> T:
        return retrying(is_unavailable, num_attempts=self._num_attempts)(lambda: _called(call))


def _called(call: Callable[[], T]) -> T:
    try:
        return call()
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _opened(call: Any) -> tuple[Any, Any]:
    """Return the first message (None if there is none) and the rest of the stream."""
    return next(call, None), call


def _stream(first: Any, call: Any) -> Iterator[Any]:
    try:
        if first is not None:
            yield first
        yield from call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
