"""The client of neap's services: for asyncio here, and synchronous in `client`, which hatch_build.py makes of this
file."""

import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Unpack

from grpc_health.v1 import health_pb2

from neap_client import methods
from neap_client.aio_calls import called, open_channel, read, sleep
from neap_client.aio_generation import AsyncGenerationStream, repeat
from neap_client.base import POLL_S, ChangeOptions, ClientBase, WatchOptions
from neap_client.calibration.v1 import calibration_pb2
from neap_client.channel import Metadata
from neap_client.errors import Exhausted, Unavailable
from neap_client.generation import Answer, OnStarted
from neap_client.inference.v1 import inference_pb2
from neap_client.methods import Method, Request, Response
from neap_client.router.v1 import router_pb2


class AsyncNeapClient(ClientBase):
    """See ClientBase for the arguments and for what is repeated. The client for asyncio belongs to the running event
    loop; the synchronous one is thread-safe."""

    def _open_channel(self, by_address: bool = False) -> Any:
        return open_channel(self.target, self._security, self._health_service, by_address=by_address)

    async def close(self) -> None:
        self._is_closed = True
        for channel in self._channels:
            await channel.latest.close()

    async def __aenter__(self) -> "AsyncNeapClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def is_serving(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Return whether the health check of `service` ("" for the whole server) says SERVING.
        Raises Unavailable without an answer."""
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await self._call(methods.CHECK, request, timeout_s=timeout_s)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_ready(self, service: str = "", *, timeout_s: float = 60.0) -> None:
        """Wait until `service` is SERVING. Raises Unavailable (reason NOT_READY) after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                if await self.is_serving(service):
                    return
            except Unavailable:
                pass
            if time.monotonic() >= deadline_s:
                raise self._not_ready(timeout_s)
            await sleep(POLL_S)

    # inference

    def generate(
        self,
        request: inference_pb2.GenerateRequest | bytes,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        metadata: Metadata = (),
        prefix: str | None = None,
        on_started: OnStarted | None = None,
        keeps: bool = True,
    ) -> AsyncGenerationStream:
        """Stream Started, token chunks and Finished. `timeout_s` is the deadline of the whole stream.

        The call is repeated before the first token, and resumed after it: see AsyncGenerationStream. All calls have the
        same `request_id`, so they get the same version from an alias with a canary. None makes a new id. `metadata` is
        sent beside the client's own. `request` may be serialized already, which spares calls with the same large prompt
        the work; `prefix` is then its `neap_client.affinity.prefix_key`, without which it goes to the workers in turn.
        `on_started` is called at once with the Started of a call, which the stream holds back until the first token.
        A stream that does not keep the answer has no `text`, `reasoning`, `tool_calls`, `prompt_tokens` and `answer`.
        """
        options = self._generation(request, timeout_s, request_id, metadata, prefix, on_started, keeps)
        return AsyncGenerationStream(**options)

    async def answer(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        request_id: str | None = None,
        metadata: Metadata = (),
    ) -> Answer:
        """Return the whole answer. The arguments are those of `generate`, whose stream this reads.
        Raises what the stream raises."""
        async with self.generate(request, timeout_s=timeout_s, request_id=request_id, metadata=metadata) as stream:
            async for _ in stream:
                pass
            return stream.answer()

    async def get_model(self, model_id: str, *, metadata: Metadata = ()) -> inference_pb2.Model:
        request = inference_pb2.GetModelRequest(model_id=model_id)
        return (await self._unary(methods.GET_MODEL, request, metadata)).model

    async def get_tokenizer(self, model_id: str, *, metadata: Metadata = ()) -> inference_pb2.Tokenizer:
        """Return an empty description for a model without a tokenizer."""
        request = inference_pb2.GetModelRequest(model_id=model_id)
        return (await self._unary(methods.GET_MODEL, request, metadata)).tokenizer

    async def tokenize(
        self, request: inference_pb2.TokenizeRequest, *, metadata: Metadata = ()
    ) -> inference_pb2.TokenizeResponse:
        return await self._unary(methods.TOKENIZE, request, metadata)

    async def list_models(self, *, metadata: Metadata = ()) -> list[inference_pb2.Model]:
        """Return the models in alphabetical order."""
        pages = self._pages(methods.LIST_MODELS, inference_pb2.ListModelsRequest(), metadata)
        return [model async for page in pages for model in page.models]

    # calibration

    async def create_calibration(
        self, spec: calibration_pb2.CalibrationSpec, *, request_id: str
    ) -> calibration_pb2.Calibration:
        """Create a job. Idempotent by `request_id`."""
        request = calibration_pb2.CreateCalibrationRequest(request_id=request_id, spec=spec)
        return (await self._unary(methods.CREATE_CALIBRATION, request)).calibration

    async def get_calibration(self, calibration_id: str) -> calibration_pb2.Calibration:
        request = calibration_pb2.GetCalibrationRequest(calibration_id=calibration_id)
        return (await self._unary(methods.GET_CALIBRATION, request)).calibration

    async def list_calibrations(
        self,
        model_id: str = "",
        *,
        on_unreadable: Callable[[calibration_pb2.UnreadableCalibration], object] = lambda _: None,
    ) -> AsyncIterator[calibration_pb2.Calibration]:
        """Iterate over jobs, newest first, page by page. An empty `model_id` means all models.

        `on_unreadable` is called for each job of a page whose record the service cannot read.
        """
        request = calibration_pb2.ListCalibrationsRequest(model_id=model_id)
        async for page in self._pages(methods.LIST_CALIBRATIONS, request):
            for record in page.unreadable:
                on_unreadable(record)
            for calibration in page.calibrations:
                yield calibration

    async def cancel_calibration(self, calibration_id: str) -> calibration_pb2.Calibration:
        request = calibration_pb2.CancelCalibrationRequest(calibration_id=calibration_id)
        return (await self._unary(methods.CANCEL_CALIBRATION, request)).calibration

    async def retry_calibration(self, calibration_id: str) -> calibration_pb2.Calibration:
        """Try now to publish a finished job whose router could not be published."""
        request = calibration_pb2.RetryCalibrationRequest(calibration_id=calibration_id)
        return (await self._unary(methods.RETRY_CALIBRATION, request)).calibration

    async def watch_calibration(
        self, calibration_id: str, **options: Unpack[WatchOptions]
    ) -> AsyncIterator[calibration_pb2.Calibration]:
        """Yield the job now and after every change until it ends.
        Watching goes on after a lost connection or a restart."""
        request = calibration_pb2.WatchCalibrationRequest(calibration_id=calibration_id)
        async for reply in self._watch(methods.WATCH_CALIBRATION, request, **options):
            yield reply.calibration

    # routers

    async def list_versions(self, model_id: str) -> AsyncIterator[router_pb2.RouterVersion]:
        """Iterate over the versions, newest first, page by page, without the manifests."""
        request = router_pb2.ListVersionsRequest(model_id=model_id)
        async for page in self._pages(methods.LIST_VERSIONS, request):
            for version in page.versions:
                yield version

    async def get_version(
        self, model_id: str, *, version: int | None = None, alias: str | None = None
    ) -> router_pb2.RouterVersion:
        """Return one version, selected by exactly one of `version` and `alias`."""
        request = router_pb2.GetVersionRequest(model_id=model_id, version=version, alias=alias)
        return (await self._unary(methods.GET_VERSION, request)).version

    async def list_aliases(self, model_id: str) -> list[router_pb2.Alias]:
        """Return the aliases in alphabetical order."""
        request = router_pb2.ListAliasesRequest(model_id=model_id)
        pages = self._pages(methods.LIST_ALIASES, request)
        return [alias async for page in pages for alias in page.aliases]

    async def set_alias(
        self, model_id: str, alias: str, version: int, **change: Unpack[ChangeOptions]
    ) -> router_pb2.AliasChange:
        """Point an alias at a version. Never repeated."""
        request = router_pb2.SetAliasRequest(model_id=model_id, alias=alias, version=version, **change)
        return (await self._unary(methods.SET_ALIAS, request)).change

    async def set_canary(self, request: router_pb2.SetCanaryRequest) -> router_pb2.AliasChange:
        """Set or end a canary. Never repeated."""
        return (await self._unary(methods.SET_CANARY, request)).change

    async def promote_canary(self, request: router_pb2.PromoteCanaryRequest) -> router_pb2.AliasChange:
        """Promote a canary. Never repeated."""
        return (await self._unary(methods.PROMOTE_CANARY, request)).change

    async def rollback_alias(
        self, model_id: str, alias: str, **change: Unpack[ChangeOptions]
    ) -> router_pb2.AliasChange:
        """Undo the last change of an alias. Never repeated."""
        request = router_pb2.RollbackAliasRequest(model_id=model_id, alias=alias, **change)
        return (await self._unary(methods.ROLLBACK_ALIAS, request)).change

    async def begin_trial(self, request: router_pb2.BeginTrialRequest) -> router_pb2.AliasChange:
        """Put a version on trial. Safe to repeat."""
        return (await self._unary(methods.BEGIN_TRIAL, request)).change

    async def order_judge(self, request: router_pb2.OrderJudgeRequest) -> None:
        """Tell the judge what to leave alone."""
        await self._unary(methods.ORDER_JUDGE, request)

    async def get_judged(self, model_id: str) -> router_pb2.GetJudgedResponse:
        """Return what the judge knows of a model's aliases."""
        return await self._unary(methods.GET_JUDGED, router_pb2.GetJudgedRequest(model_id=model_id))

    async def report_served(self, request: router_pb2.ReportServedRequest) -> router_pb2.ReportServedResponse:
        """Report what a worker has served. Safe to repeat."""
        return await self._unary(methods.REPORT_SERVED, request)

    async def alias_history(self, model_id: str, alias: str) -> list[router_pb2.AliasChange]:
        """Return the changes of an alias, newest first."""
        request = router_pb2.GetAliasHistoryRequest(model_id=model_id, alias=alias)
        pages = self._pages(methods.GET_ALIAS_HISTORY, request)
        return [change async for page in pages for change in page.changes]

    async def watch_routers(
        self, model_id: str, *, after_event: int = 0, **options: Unpack[WatchOptions]
    ) -> AsyncIterator[router_pb2.WatchResponse]:
        """Yield the events of a model after `after_event`, then new ones for ever, also after a lost connection or a
        restart."""
        request = router_pb2.WatchRequest(model_id=model_id, after_event=after_event)
        async for reply in self._watch(methods.WATCH, request, **options):
            request.after_event = reply.event
            yield reply

    async def _unary(self, method: Method[Request, Response], request: Request, metadata: Metadata = ()) -> Response:
        return await repeat(lambda: self._call(method, request, metadata), self._attempts(method))

    async def _call(
        self,
        method: Method[Request, Response],
        request: Request,
        metadata: Metadata = (),
        *,
        timeout_s: float | None = None,
    ) -> Response:
        """Make one attempt. `timeout_s`: None means the client's."""
        reply: Response = await called(partial(self._start, method, request, metadata, timeout_s))
        return reply

    async def _pages(
        self, method: Method[Request, Response], request: Request, metadata: Metadata = ()
    ) -> AsyncIterator[Response]:
        """Yield the reply to `request` and those with the pages after it."""
        asked: Any = request
        while True:
            reply: Any = await self._unary(method, request, metadata)
            yield reply
            asked.page_token = reply.next_page_token
            if not asked.page_token:
                return

    async def _watch(
        self, method: Method[Request, Response], request: Request, **options: Unpack[WatchOptions]
    ) -> AsyncIterator[Response]:
        """Yield replies until the service ends the stream.
        After a lost stream, call again with `request` as it is then."""
        attempts = self._watch_attempts(**options)
        while True:
            call = self._start_stream(method, request, timeout_s=attempts.open())
            try:
                while (reply := await read(call)) is not None:
                    attempts.note_message()
                    yield reply
                return
            except (Exhausted, Unavailable) as error:
                if self._is_closed:
                    raise
                wait_s = attempts.wait_s(error)
            finally:
                call.cancel()
            await sleep(wait_s)
