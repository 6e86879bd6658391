"""The synchronous client of neap's services."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2

from neap_client import methods
from neap_client.base import POLL_S, ChangeOptions, ClientBase, WatchOptions
from neap_client.calibration.v1 import calibration_pb2
from neap_client.channel import open_channel
from neap_client.errors import Exhausted, Unavailable
from neap_client.generation import Answer, GenerationStream
from neap_client.inference.v1 import inference_pb2
from neap_client.metadata import Metadata
from neap_client.methods import Method, Request, Response
from neap_client.retry import repeat
from neap_client.router.v1 import router_pb2
from neap_client.status import from_rpc_error

T = TypeVar("T")


class NeapClient(ClientBase):
    """The synchronous client; see ClientBase for its arguments and for what is repeated. Thread-safe."""

    def _open_channel(self, by_address: bool = False) -> grpc.Channel:
        return open_channel(self.target, self._security, self._health_service, by_address=by_address)

    def close(self) -> None:
        self._is_closed = True
        for channel in self._channels:
            channel.latest.close()

    def __enter__(self) -> "NeapClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_serving(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Return whether the health check of `service` ("" for the whole server) says SERVING.
        Raises Unavailable without an answer."""
        request = health_pb2.HealthCheckRequest(service=service)
        reply = self._call(methods.CHECK, request, timeout_s=timeout_s)
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
                raise self._not_ready(timeout_s)
            time.sleep(POLL_S)

    # inference

    def generate(
        self,
        request: inference_pb2.GenerateRequest | bytes,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        metadata: Metadata = (),
        prefix: str | None = None,
    ) -> GenerationStream:
        """Stream Started, token chunks and Finished. `timeout_s` is the deadline of the whole stream.

        The call is repeated before the first token, and resumed after it: see GenerationStream. All calls have the same
        `request_id`, so they get the same version from an alias with a canary. None makes a new id. `metadata` is sent
        beside the client's own. `request` may be serialized already, which spares calls with the same large prompt the
        work; `prefix` is then its `neap_client.affinity.prefix_key`, without which it goes to the workers in turn.
        """
        return GenerationStream(**self._generation(request, timeout_s, request_id, metadata, prefix))

    def answer(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        metadata: Metadata = (),
    ) -> Answer:
        """Return the whole answer. The arguments are those of `generate`, whose stream this reads.
        Raises what the stream raises."""
        with self.generate(request, timeout_s=timeout_s, request_id=request_id, metadata=metadata) as stream:
            for _ in stream:
                pass
            return stream.answer()

    def get_model(self, model_id: str, *, metadata: Metadata = ()) -> inference_pb2.Model:
        request = inference_pb2.GetModelRequest(model_id=model_id)
        return self._unary(methods.GET_MODEL, request, metadata).model

    def list_models(self, *, metadata: Metadata = ()) -> list[inference_pb2.Model]:
        """Return the models in alphabetical order."""
        pages = self._pages(methods.LIST_MODELS, inference_pb2.ListModelsRequest(), metadata)
        return [model for page in pages for model in page.models]

    # calibration

    def create_calibration(
        self, spec: calibration_pb2.CalibrationSpec, *, request_id: str
    ) -> calibration_pb2.Calibration:
        """Create a job. Idempotent by `request_id`."""
        request = calibration_pb2.CreateCalibrationRequest(request_id=request_id, spec=spec)
        return self._unary(methods.CREATE_CALIBRATION, request).calibration

    def get_calibration(self, calibration_id: str) -> calibration_pb2.Calibration:
        request = calibration_pb2.GetCalibrationRequest(calibration_id=calibration_id)
        return self._unary(methods.GET_CALIBRATION, request).calibration

    def list_calibrations(
        self,
        model_id: str = "",
        *,
        on_unreadable: Callable[[calibration_pb2.UnreadableCalibration], object] = lambda _: None,
    ) -> Iterator[calibration_pb2.Calibration]:
        """Iterate over jobs, newest first, page by page. An empty `model_id` means all models.

        `on_unreadable` is called for each job of a page whose record the service cannot read.
        """
        request = calibration_pb2.ListCalibrationsRequest(model_id=model_id)
        for page in self._pages(methods.LIST_CALIBRATIONS, request):
            for record in page.unreadable:
                on_unreadable(record)
            yield from page.calibrations

    def cancel_calibration(self, calibration_id: str) -> calibration_pb2.Calibration:
        request = calibration_pb2.CancelCalibrationRequest(calibration_id=calibration_id)
        return self._unary(methods.CANCEL_CALIBRATION, request).calibration

    def retry_calibration(self, calibration_id: str) -> calibration_pb2.Calibration:
        """Try now to publish a finished job whose router could not be published."""
        request = calibration_pb2.RetryCalibrationRequest(calibration_id=calibration_id)
        return self._unary(methods.RETRY_CALIBRATION, request).calibration

    def watch_calibration(
        self, calibration_id: str, **options: Unpack[WatchOptions]
    ) -> Iterator[calibration_pb2.Calibration]:
        """Yield the job now and after every change until it ends.
        Watching goes on after a lost connection or a restart."""
        request = calibration_pb2.WatchCalibrationRequest(calibration_id=calibration_id)
        for reply in self._watch(methods.WATCH_CALIBRATION, request, **options):
            yield reply.calibration

    # routers

    def list_versions(self, model_id: str) -> Iterator[router_pb2.RouterVersion]:
        """Iterate over the versions, newest first, page by page, without the manifests."""
        request = router_pb2.ListVersionsRequest(model_id=model_id)
        for page in self._pages(methods.LIST_VERSIONS, request):
            yield from page.versions

    def get_version(
        self, model_id: str, *, version: int | None = None, alias: str | None = None
    ) -> router_pb2.RouterVersion:
        """Return one version, selected by exactly one of `version` and `alias`."""
        request = router_pb2.GetVersionRequest(model_id=model_id, version=version, alias=alias)
        return self._unary(methods.GET_VERSION, request).version

    def list_aliases(self, model_id: str) -> list[router_pb2.Alias]:
        """Return the aliases in alphabetical order."""
        request = router_pb2.ListAliasesRequest(model_id=model_id)
        pages = self._pages(methods.LIST_ALIASES, request)
        return [alias for page in pages for alias in page.aliases]

    def set_alias(
        self, model_id: str, alias: str, version: int, **change: Unpack[ChangeOptions]
    ) -> router_pb2.AliasChange:
        """Point an alias at a version. Never repeated."""
        request = router_pb2.SetAliasRequest(model_id=model_id, alias=alias, version=version, **change)
        return self._unary(methods.SET_ALIAS, request).change

    def set_canary(self, request: router_pb2.SetCanaryRequest) -> router_pb2.AliasChange:
        """Set or end a canary. Never repeated."""
        return self._unary(methods.SET_CANARY, request).change

    def promote_canary(self, request: router_pb2.PromoteCanaryRequest) -> router_pb2.AliasChange:
        """Promote a canary. Never repeated."""
        return self._unary(methods.PROMOTE_CANARY, request).change

    def rollback_alias(self, model_id: str, alias: str, **change: Unpack[ChangeOptions]) -> router_pb2.AliasChange:
        """Undo the last change of an alias. Never repeated."""
        request = router_pb2.RollbackAliasRequest(model_id=model_id, alias=alias, **change)
        return self._unary(methods.ROLLBACK_ALIAS, request).change

    def alias_history(self, model_id: str, alias: str) -> list[router_pb2.AliasChange]:
        """Return the changes of an alias, newest first."""
        request = router_pb2.GetAliasHistoryRequest(model_id=model_id, alias=alias)
        pages = self._pages(methods.GET_ALIAS_HISTORY, request)
        return [change for page in pages for change in page.changes]

    def watch_routers(
        self, model_id: str, *, after_event: int = 0, **options: Unpack[WatchOptions]
    ) -> Iterator[router_pb2.WatchResponse]:
        """Yield the events of a model after `after_event`, then new ones for ever, also after a lost connection or a
        restart."""
        request = router_pb2.WatchRequest(model_id=model_id, after_event=after_event)
        for reply in self._watch(methods.WATCH, request, **options):
            request.after_event = reply.event
            yield reply

    def _unary(self, method: Method[Request, Response], request: Request, metadata: Metadata = ()) -> Response:
        return repeat(lambda: self._call(method, request, metadata), self._attempts(method))

    def _call(
        self,
        method: Method[Request, Response],
        request: Request,
        metadata: Metadata = (),
        *,
        timeout_s: float | None = None,
    ) -> Response:
        """Make one attempt. `timeout_s`: None means the client's."""
        reply: Response = _called(lambda: self._start(method, request, metadata, timeout_s))
        return reply

    def _pages(
        self, method: Method[Request, Response], request: Request, metadata: Metadata = ()
    ) -> Iterator[Response]:
        """Yield the reply to `request` and those with the pages after it."""
        asked: Any = request
        while True:
            reply: Any = self._unary(method, request, metadata)
            yield reply
            asked.page_token = reply.next_page_token
            if not asked.page_token:
                return

    def _watch(
        self, method: Method[Request, Response], request: Request, **options: Unpack[WatchOptions]
    ) -> Iterator[Response]:
        """Yield replies until the service ends the stream.
        After a lost stream, call again with `request` as it is then."""
        attempts = self._watch_attempts(**options)
        while True:
            call = self._start_stream(method, request, timeout_s=attempts.open())
            try:
                while (reply := _called(partial(next, call, None))) is not None:
                    attempts.note_message()
                    yield reply
                return
            except (Exhausted, Unavailable) as error:
                if self._is_closed:
                    raise
                wait_s = attempts.wait_s(error)
            finally:
                call.cancel()
            time.sleep(wait_s)


def _called(call: Callable[[], T]) -> T:
    try:
        return call()
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
