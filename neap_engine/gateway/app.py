"""The ASGI application: endpoints of OpenAI's API, and health."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import structlog
from neap_client import AsyncNeapClient
from neap_client.channel import REQUEST_ID_KEY, Metadata
from neap_client.inference.v1 import inference_pb2 as pb
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from neap_engine.gateway.answers import Response, model_object
from neap_engine.gateway.body import BodyParser
from neap_engine.gateway.clients import SERVICE_NAME, Clients, address_key
from neap_engine.gateway.collected import as_json
from neap_engine.gateway.errors import (
    CLIENT_CLOSED_REQUEST,
    error_headers,
    error_object,
    gateway_full,
    path_error,
    refused,
    unexpected,
)
from neap_engine.gateway.exchange import Exchange
from neap_engine.gateway.merging import EarlyStream, merged
from neap_engine.gateway.metrics import GatewayMetrics
from neap_engine.gateway.requests import RequestedGeneration, parse_generation
from neap_engine.gateway.responses import ItemResponse
from neap_engine.gateway.responses_schema import ResponsesRequest
from neap_engine.gateway.schema import ChatRequest, CompletionRequest, SamplingFields
from neap_engine.gateway.tokenization import (
    detokenize_request,
    text_object,
    tokenize_request,
    tokenizer_object,
    tokens_object,
)
from neap_engine.version import installed_version
from shared.errors import InvalidInput, NeapError, Unavailable
from shared.gateway_settings import GatewaySettings
from shared.rpc.tracing import end_http_span, trace_id_of
from shared.shares import Hold, Shares

HEALTH_TIMEOUT_S = 2.0
# What a number in a list takes, with its digits.
TOKEN_BYTES = 48

Handler = Callable[[Exchange], Awaitable[None]]
log = structlog.get_logger("neap.gateway")


class Gateway:
    """Belongs to one event loop. `drain` makes it unready; `ending` ends the requests that run."""

    def __init__(self, settings: GatewaySettings, workers: AsyncNeapClient, metrics: GatewayMetrics) -> None:
        self.ending = asyncio.Event()
        self._settings = settings
        self._workers = workers
        self._metrics = metrics
        self._is_draining = False
        self._clients = Clients(workers)
        self._parser = BodyParser()
        self._places = Shares(settings.max_requests, "places", gateway_full)
        self._bytes = Shares(settings.body_budget_mb << 20, "bytes for bodies and answers", gateway_full)
        metrics.running.set_function(lambda: self._places.used)
        metrics.body_bytes.set_function(lambda: self._bytes.used)

    @property
    def num_running(self) -> int:
        """The number of requests whose body has arrived and that are not answered yet."""
        return self._places.used

    def drain(self) -> None:
        self._is_draining = True

    def app(self) -> Starlette:
        routes = [
            self._route("/v1/chat/completions", "POST", partial(self._generate, kind=ChatRequest)),
            self._route("/v1/completions", "POST", partial(self._generate, kind=CompletionRequest)),
            self._route("/v1/responses", "POST", partial(self._generate, kind=ResponsesRequest)),
            self._route("/v1/models", "GET", self._list_models),
            self._route("/tokenize", "POST", partial(self._tokenize, parse=tokenize_request, answer=tokens_object)),
            self._route("/detokenize", "POST", partial(self._tokenize, parse=detokenize_request, answer=text_object)),
            self._route("/tokenizer_info", "GET", self._get_tokenizer),
            self._route("/v1/models/{model_id:path}", "GET", self._get_model),
            Route("/healthz", _alive),
            Route("/readyz", self._ready),
            Route("/health", self._ready),
            Route("/version", _version),
        ]
        origins = self._settings.cors_origins
        every, methods = ["*"], ["GET", "POST"]
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=every, expose_headers=every
        )
        app = Starlette(
            routes=routes, exception_handlers={HTTPException: _path_error}, middleware=[cors] if origins else []
        )
        # A path with another slash is unknown. A redirect would name a host that a proxy may not know.
        app.router.redirect_slashes = False
        return app

    def _route(self, path: str, method: str, handler: Handler) -> Route:
        name = path.partition("/{")[0]
        self._metrics.begin(name)
        return Route(path, _Endpoint(self, name, handler), methods=[method])

    async def serve(self, endpoint: str, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request to the API: every failure becomes OpenAI's error object. Logs and counts it."""
        started_s = time.monotonic()
        exchange = Exchange(
            scope,
            receive,
            send,
            request_timeout_s=self._settings.request_timeout_s,
            stall_timeout_s=self._settings.stall_timeout_s,
        )
        span = exchange.start_span(endpoint)
        if trace_id := trace_id_of(span):
            exchange.log_fields["trace_id"] = trace_id
        error: NeapError | None = None
        try:
            exchange.check_origin(self._settings.cors_origins)
            await exchange.run(handler, self.ending)
        except NeapError as caught:
            # The frames of its traceback hold the request, and would do so until the next collection of garbage.
            error = caught.with_traceback(None)
            if error.reason.startswith("GRPC_"):
                # The client sees only the reason, because the text may contain addresses.
                log.warning("call to a worker failed", reason=error.reason, why=error.message)
        except Exception as caught:
            error = unexpected(caught)
        finally:
            if error is not None:
                await exchange.fail(error)
            status = exchange.status or CLIENT_CLOSED_REQUEST
            reason = {"reason": error.reason} if error is not None else {}
            self._record(endpoint, exchange, status, reason, time.monotonic() - started_s)
            end_http_span(span, status, reason)

    def _record(
        self, endpoint: str, exchange: Exchange, status: int, reason: Mapping[str, str], duration_s: float
    ) -> None:
        if reason:
            self._metrics.errors.labels(endpoint, reason["reason"]).inc()
        self._metrics.requests.labels(endpoint, str(status)).inc()
        self._metrics.duration.labels(endpoint).observe(duration_s)
        log.info(
            "request ended",
            endpoint=endpoint,
            status=status,
            duration_s=round(duration_s, 6),
            request_id=exchange.request_id,
            **reason,
            **exchange.log_fields,
        )

    def _token(self, exchange: Exchange) -> Metadata:
        return () if self._settings.drop_tokens else exchange.token()

    def _metadata(self, exchange: Exchange) -> Metadata:
        """Return the metadata of a call with one response. A generation has an argument for the request id."""
        return (*self._token(exchange), (REQUEST_ID_KEY, exchange.request_id))

    async def _list_models(self, exchange: Exchange) -> None:
        with self._placed(exchange):
            models = await self._workers.list_models(metadata=self._metadata(exchange))
            data = [model_object(model) for model in models]
            await exchange.respond(200, {"object": "list", "data": data})

    async def _get_model(self, exchange: Exchange) -> None:
        model_id: str = exchange.scope["path_params"]["model_id"]
        with self._placed(exchange):
            model = await self._workers.get_model(model_id, metadata=self._metadata(exchange))
            await exchange.respond(200, model_object(model))

    async def _get_tokenizer(self, exchange: Exchange) -> None:
        (model_id,) = parse_qs(exchange.scope["query_string"].decode("latin-1")).get("model", [""])[:1]
        metadata = self._metadata(exchange)
        with self._placed(exchange):
            model_id = model_id or await self._only_model(metadata)
            tokenizer = await self._workers.get_tokenizer(model_id, metadata=metadata)
            await exchange.respond(200, tokenizer_object(tokenizer))

    async def _tokenize(
        self,
        exchange: Exchange,
        *,
        parse: Callable[[bytes], pb.TokenizeRequest],
        answer: Callable[[pb.TokenizeResponse], dict[str, Any]],
    ) -> None:
        client, caller = await self._clients.identify(self._token(exchange), exchange.address, exchange.request_id)
        metadata = (*caller, (REQUEST_ID_KEY, exchange.request_id))
        with self._bytes.holding(client) as hold_bytes, self._places.holding(client) as hold_places:
            body = await exchange.read_body(hold_bytes, max_bytes=self._settings.max_body_mb << 20)
            hold_places(1)
            request = await self._parser.parse(client, body, parse)
            request.model_id = request.model_id or await self._only_model(metadata)
            response = await self._workers.tokenize(request, metadata=metadata)
            num_bytes = TOKEN_BYTES * len(response.token_ids) + 2 * response.ByteSize()
            self._check_answer(num_bytes)  # it comes at once, so a share alone would let it have nearly all
            hold_bytes(len(body) + num_bytes, goes_on=True)
            await exchange.respond_in_parts(200, [await asyncio.to_thread(lambda: as_json(answer(response)))])

    async def _only_model(self, metadata: Metadata) -> str:
        """The model that a request without one means. Raises InvalidInput if there are several."""
        models = await self._workers.list_models(metadata=metadata)
        if len(models) != 1:
            raise refused("the workers serve several models: name one", "model")
        return models[0].model_id

    @contextmanager
    def _placed(self, exchange: Exchange) -> Iterator[None]:
        """Hold a place for a request without a body."""
        exchange.expect_no_body()
        with self._places.holding(address_key(exchange.address)) as hold:
            hold(1)
            yield

    async def _generate(self, exchange: Exchange, *, kind: type[SamplingFields]) -> None:
        """Hold bytes as they arrive and a place once all have, so that a client that sends slowly takes nothing from
        others."""
        started_s = time.monotonic()
        client, caller = await self._clients.identify(self._token(exchange), exchange.address, exchange.request_id)
        with self._bytes.holding(client) as hold_bytes, self._places.holding(client) as hold_places:
            body = await exchange.read_body(hold_bytes, max_bytes=self._settings.max_body_mb << 20)
            hold_places(1)
            parse = partial(
                parse_generation,
                kind=kind,
                max_choices=self._settings.max_choices,
                model_defaults=self._settings.generation_defaults == "model",
            )
            generation = await self._parser.parse(client, body, parse)
            del body
            if 2 * generation.num_bytes > self._bytes.total:
                raise InvalidInput(
                    f"the prompts take {generation.num_bytes} bytes, once for each choice; at most "
                    f"{self._bytes.total // 2} are allowed",
                    reason="BODY_TOO_LARGE",
                    metadata={"max_bytes": str(self._bytes.total // 2)},
                )
            hold_bytes(generation.num_bytes)
            await self._answer(exchange, generation, caller, started_s, hold_bytes)

    async def _answer(
        self,
        exchange: Exchange,
        generation: RequestedGeneration,
        caller: Metadata,
        started_s: float,
        hold_bytes: Hold,
    ) -> None:
        calls = generation.calls()
        exchange.log_fields.update(generation.log_fields, model_id=generation.model[:128])
        response = (ItemResponse if generation.echo else Response)(exchange.request_id, generation)
        # The workers' logs tell the calls of one request apart by these.
        suffixes = [f"-{index}" for index in range(len(calls))] if len(calls) > 1 else [""]
        streams = [
            EarlyStream(
                self._workers,
                call,
                deadline_s=started_s + self._settings.generation_timeout_s,
                request_id=exchange.request_id + suffix,
                metadata=caller,
                prefix=prefix,
                keeps=False,
            )
            for (call, prefix), suffix in zip(calls, suffixes, strict=True)
        ]
        choices = [response.choice(index, stream) for index, stream in enumerate(streams)]
        events = merged(streams)
        num_bytes = 0
        try:
            async with aclosing(events):
                async for index, event in events:
                    if "ttft_s" not in exchange.log_fields and event.chunk.tokens:
                        ttft_s = time.monotonic() - started_s
                        exchange.log_fields["ttft_s"] = round(ttft_s, 6)
                        self._metrics.first_token.labels(exchange.scope["path"]).observe(ttft_s)
                    choice = choices[index]
                    num_bytes -= choice.num_bytes
                    parts = choice.receive(event)
                    num_bytes += choice.num_bytes
                    if num_bytes:
                        self._check_answer(num_bytes)
                        hold_bytes(generation.num_bytes + num_bytes, goes_on=True)
                    if generation.is_stream:
                        if not exchange.status:
                            await exchange.start_stream(response.error_event)
                        await exchange.send_events(response.chunks(parts, choice))
        finally:
            num_tokens = sum(choice.num_tokens for choice in choices)
            self._metrics.tokens.inc(num_tokens)
            exchange.log_fields["generated_tokens"] = num_tokens
            if resumed := sum(len(stream.resumptions) for stream in streams):
                self._metrics.resumptions.inc(resumed)
                exchange.log_fields["resumptions"] = resumed
        if any(choice.finished is None for choice in choices):
            raise Unavailable("the worker ended the answer early", reason="INCOMPLETE_ANSWER")
        if not generation.is_stream:
            await exchange.respond_in_parts(200, response.whole(choices))
            return
        await exchange.send_events(response.ending(choices))
        await exchange.end_stream()

    def _check_answer(self, num_bytes: int) -> None:
        """Raises InvalidInput for an answer that no client's share could hold."""
        if 2 * num_bytes > self._bytes.total:
            raise InvalidInput(
                f"the answer takes more than {self._bytes.total // 2} bytes, which is the limit: ask for a stream, for "
                "fewer choices or for fewer log-probabilities, or for the tokens of less text",
                reason="ANSWER_TOO_LARGE",
                metadata={"max_bytes": str(self._bytes.total // 2)},
            )

    async def _ready(self, request: Request) -> JSONResponse:
        """200 if requests can be served: the gateway is not draining, and a worker serves."""
        if self._is_draining:
            return JSONResponse({"status": "draining"}, 503)
        try:
            is_serving = await self._workers.is_serving(SERVICE_NAME, timeout_s=HEALTH_TIMEOUT_S)
        except NeapError as error:
            log.debug("no worker is ready", reason=error.reason, why=error.message)
            is_serving = False
        if not is_serving:
            return JSONResponse({"status": "no worker serves"}, 503)
        return JSONResponse({"status": "ready"})


class _Endpoint:
    """An ASGI application, so that the handler has `receive` and `send` themselves."""

    def __init__(self, gateway: Gateway, name: str, handler: Handler) -> None:
        self._gateway, self._name, self._handler = gateway, name, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway.serve(self._name, self._handler, scope, receive, send)


async def _alive(request: Request) -> JSONResponse:
    return JSONResponse({"status": "alive"})


async def _version(request: Request) -> JSONResponse:
    return JSONResponse({"version": installed_version() or ""})


async def _path_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    neap_error = path_error(error.status_code, request.url.path)
    headers = {**error_headers(neap_error), **(error.headers or {})}
    return JSONResponse({"error": error_object(neap_error)}, error.status_code, headers)
