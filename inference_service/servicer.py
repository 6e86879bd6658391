"""The servicer of neap.inference.v1."""

import asyncio
from collections.abc import Mapping
from typing import Any

import structlog
from neap_client.inference.v1 import inference_pb2, inference_pb2_grpc

from inference_service.chat import PreparedChat
from inference_service.convert import (
    from_defaults,
    from_event,
    prompt_digest,
    taken_defaults,
    to_generation_request,
    to_router_choice,
)
from inference_service.generate_call import EventStream, GenerateCall, Wakeups, deadline_s_of
from inference_service.metrics import WorkerMetrics
from inference_service.pools import Pools
from inference_service.routers import LoadedRouter, RouterChoice, RouterStore
from inference_service.served_model import ServedModel
from inference_service.tap import Tap
from inference_service.tokenization import described, token_texts, tokenized
from shared.chat.parser import AnswerParser
from shared.engine.engine import Engine
from shared.engine.request.handle import GenerationHandle
from shared.engine.request.prompt import decode_prompt
from shared.engine.request.request import GenerationRequest
from shared.errors import NotFound, PreconditionFailed, Unavailable
from shared.ladder.proposers import GRAMMAR, PREDICTION
from shared.rpc.callers import Role, client_key, least_priority, on_behalf_of, request_pool
from shared.rpc.interceptors import current_request_id, write_response
from shared.rpc.pages import named_page

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

MAX_WARNINGS = 16
MAX_WARNING_CHARACTERS = 256

log = structlog.get_logger("neap.inference")


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Belongs to one event loop. UNAVAILABLE (reason NOT_READY) until `set_ready`.

    `stall_timeout_s`: a client that reads nothing for so long has its call ended with RESOURCE_EXHAUSTED (SLOW_READER).
    `pools`: the same as those of `routers`, so that a process has each pool once.
    `priority_of_roles`: 0 for roles that are absent. `chats_have_control_tokens` as in `to_generation_request`. `tap`:
    what keeps answers to learn from, if anything does. `shares_prefixes_by_pool`: see --prefix-cache-scope.
    """

    def __init__(
        self,
        routers: RouterStore,
        *,
        stall_timeout_s: float = 30.0,
        metrics: WorkerMetrics | None = None,
        pools: Pools | None = None,
        priority_of_roles: Mapping[Role, int] | None = None,
        chats_have_control_tokens: bool = False,
        tap: Tap | None = None,
        shares_prefixes_by_pool: bool = False,
    ) -> None:
        self._shares_prefixes_by_pool = shares_prefixes_by_pool
        self._tap = tap
        self._chats_have_control_tokens = chats_have_control_tokens
        self._priority_of_roles = priority_of_roles or {}
        self._pools = pools or Pools()
        self._routers = routers
        self._metrics = metrics or WorkerMetrics()
        self._stall_timeout_s = stall_timeout_s
        self._served: dict[str, ServedModel] = {}
        self._ready = False
        # Streams of calls whose clients go on elsewhere.
        self._resumable: set[EventStream] = set()
        self._wakeups: Wakeups | None = None
        self._hands_over = False
        self._loading = ""

    def set_loading(self, model: str, step: str) -> None:
        """Sets what calls are told until `set_ready`. Any thread may call it."""
        self._loading = f"({step} {model})"

    def add_model(self, engine: Engine, *, max_active: int = 80, max_active_per_client: int | None = None) -> None:
        """Serves `engine` under its model's id. `max_active` bounds the calls that are being prepared, wait or run.

        A client is an authenticated caller's name or, without authentication, an address. None: it may have as many as
        it leaves free for others.
        """
        model_id, texts = engine.loaded.model_id, token_texts(engine.loaded.tokenizer)
        self._served[model_id] = ServedModel(engine, max_active, max_active_per_client, texts)
        self._routers.bind_with(model_id, engine)
        self._metrics.add_engine(engine, versions=lambda: {r.version for r in self._routers.loaded(model_id)})

    def set_ready(self) -> None:
        self._ready = True

    def hand_over(self) -> int:
        """Ends the calls whose clients resume them elsewhere, after the tokens that they have, and refuses such calls
        from now on. Returns their number."""
        self._hands_over = True
        if self._resumable:
            log.info("answers are handed over", num_calls=len(self._resumable))
        for stream in self._resumable:
            stream.push(_handed_over())
        if self._wakeups is not None:
            self._wakeups.wake()
        return len(self._resumable)

    def engine(self, model_id: str) -> Engine:
        """Raises Unavailable (NOT_READY) and NotFound (MODEL_NOT_FOUND)."""
        return self._find(model_id).engine

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> None:
        """Writes responses instead of yielding them, so that a write that the client does not read can time out."""
        with GenerateCall(self._metrics) as call:
            deadline_s = deadline_s_of(context)
            served = self._find(request.model_id)
            call.set_model(request.model_id, deadline_s, is_chat=request.HasField("chat"))
            if request.can_go_elsewhere and served.is_busy:
                raise Unavailable("the request would have to wait here", reason="BUSY")
            with served.admitted(client_key(context), on_behalf_of(context)):
                await self._generate(request, served, deadline_s, context, call)

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        served: ServedModel,
        deadline_s: float,
        context: Any,
        call: GenerateCall,
    ) -> None:
        engine, pool = served.engine, request_pool(request.pool)
        # Where a worker dies, its log has the requests that have begun and not ended: one of them may be the cause.
        client, behind = client_key(context), on_behalf_of(context)
        log.info("generation begins", request_id=current_request_id(), client=client, on_behalf_of=behind)
        router: LoadedRouter | None = None
        if request.depth.WhichOneof("policy") != "full":
            choice = to_router_choice(request.router)
            router = await self._routers.select(engine.loaded, choice, request_id=current_request_id(), pool=pool)
            call.set_router(router.version if router else 0, by_default=choice == RouterChoice())
        generation, chat = await self._pools.requests.call(
            to_generation_request,
            request,
            engine.loaded,
            request_id=current_request_id(),
            client=client,
            on_behalf_of=behind,
            deadline_s=deadline_s,
            least_priority=least_priority(self._priority_of_roles),
            chats_have_control_tokens=self._chats_have_control_tokens,
            cache_scope=pool if self._shares_prefixes_by_pool else "",
            pool=pool,
            router=router,
        )
        if generation.constraint is not None and not engine.has_compiled(generation.constraint):
            await self._pools.constraints.call(engine.compile, generation.constraint)
        if generation.resumed_ids:
            await _identified(engine)
        inexact = _why_inexact(request.resume, generation, engine)
        if inexact and request.resume.only_exactly:
            raise PreconditionFailed(
                f"the answer would not go on exactly as it began: {inexact}",
                reason="NUMERICS_DIFFER",
                metadata={"numerics_id": engine.numerics.id},
            )
        if self._wakeups is None:
            self._wakeups = Wakeups()
        stream = EventStream(self._wakeups)
        if request.can_resume:
            if self._hands_over:  # also a call that was being prepared when that began
                raise _handed_over()
            self._resumable.add(stream)
        try:
            handle, message = await self._pools.requests.call(_submit, engine, generation, chat, router, stream)
            call.set_handle(handle)
            started = _started(generation, engine, router, continued_inexactly=bool(inexact))
            started.started.warnings.extend(_warnings(handle))
            if request.model_defaults:
                started.started.defaults.CopyFrom(from_defaults(taken_defaults(request, engine.loaded)))
            if request.echo:
                started.started.prompt_text = request.text or await self._pools.requests.call(
                    decode_prompt, engine.loaded, generation.prompt_ids
                )
            await write_response(context, started, self._stall_timeout_s)
            taken = None
            if self._tap is not None and request.learn != inference_pb2.LEARN_NEVER:
                taken = self._tap.take(pool, engine.known_numerics_id)
            while (event := await stream.next()) is not None:
                call.record_event(event)
                if taken is not None:
                    taken.add(event)
                response = from_event(event, served.text_of, message)
                await write_response(context, response, self._stall_timeout_s)
            if taken is not None:
                taken.keep(request.model_id, generation)
        finally:
            # Cancellation and deadline both raise CancelledError in any of the awaits above.
            self._resumable.discard(stream)
            stream.close()

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: Any
    ) -> inference_pb2.GetModelResponse:
        served = self._find(request.model_id)
        await _identified(served.engine)
        return inference_pb2.GetModelResponse(
            model=self._describe(served.engine), tokenizer=described(served.engine.loaded)
        )

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        served = self._find(request.model_id)
        with served.admitted(client_key(context), on_behalf_of(context)):
            return await self._pools.requests.call(
                tokenized,
                request,
                served.engine.loaded,
                served.text_of,
                chats_have_control_tokens=self._chats_have_control_tokens,
            )

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        self._check_ready()
        names, token = named_page(request, sorted(self._served), str)
        models = [self._describe(self._served[name].engine) for name in names]
        return inference_pb2.ListModelsResponse(models=models, next_page_token=token)

    def _check_ready(self) -> None:
        if not self._ready:
            raise Unavailable(f"the worker is still loading its models {self._loading}".rstrip(), reason="NOT_READY")

    def _find(self, model_id: str) -> ServedModel:
        self._check_ready()
        served = self._served.get(model_id)
        if served is None:
            names = ", ".join(sorted(self._served))
            raise NotFound(
                f"model {model_id[:128]!r} is not served here; there is: {names}",
                reason="MODEL_NOT_FOUND",
                metadata={"model_id": model_id},
            )
        return served

    def _describe(self, engine: Engine) -> inference_pb2.Model:
        loaded = engine.loaded
        return inference_pb2.Model(
            model_id=loaded.model_id,
            fingerprint=loaded.fingerprint if loaded.identity.is_known else "",
            architecture=loaded.architecture,
            num_layers=loaded.num_layers,
            context_length=loaded.context_length,
            vocabulary_size=loaded.vocabulary_size,
            exact_promise=_promise(engine),
            why_not_exact=engine.promise.why_not,
            numerics_id=engine.known_numerics_id,
            proposers=engine.proposer_names(),
            defaults=from_defaults(loaded.defaults),
            routers=[
                inference_pb2.LoadedRouter(
                    version=router.version, manifest_digest=router.digest, proposers=router.proposers
                )
                for router in self._routers.loaded(loaded.model_id)
            ],
            load=inference_pb2.Load(
                num_running=engine.num_running, num_waiting=engine.num_waiting, kv_usage_ratio=engine.kv_usage_ratio
            ),
        )


def _submit(
    engine: Engine,
    generation: GenerationRequest,
    chat: PreparedChat | None,
    router: LoadedRouter | None,
    stream: EventStream,
) -> tuple[GenerationHandle, AnswerParser | None]:
    """The generation's handle, and, for a chat, what reads its answer: it has read what the client has of it."""
    ladder = router.ladder if router is not None else None
    handle = engine.submit(generation, ladder, on_event=stream.push, after_events=stream.wakeups.wake)
    stream.attach(handle)
    if chat is None:
        return handle, None
    parser = chat.parser(generation.prompt_ids, generation.constraint)
    parser.push(handle.resumed_texts)
    return handle, parser


async def _identified(engine: Engine) -> None:
    """Waits until the model's fingerprint is known, without holding a thread. Raises what finding it out raises."""
    await asyncio.shield(asyncio.wrap_future(engine.loaded.identity.found))


def _promise(engine: Engine) -> inference_pb2.ExactPromise:
    if engine.promise.is_exact:
        return inference_pb2.EXACT_PROMISE_TOKENS_OF_FULL
    return inference_pb2.EXACT_PROMISE_NEAR_TIES_MAY_DIFFER


def _started(
    request: GenerationRequest, engine: Engine, router: LoadedRouter | None, *, continued_inexactly: bool
) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        started=inference_pb2.Started(
            request_id=request.request_id,
            model_id=engine.loaded.model_id,
            router_version=router.version if router is not None else 0,
            router_digest=router.digest if router is not None else "",
            seed=request.sampling.seed,
            num_prompt_tokens=len(request.prompt_ids),
            policy=request.policy.name,
            lossy=request.policy.name == "relaxed",
            exact_promise=_promise(engine),
            numerics_id=engine.known_numerics_id,
            prompt_digest=prompt_digest(request.prompt_ids),
            num_resumed_tokens=len(request.resumed_ids),
            continued_inexactly=continued_inexactly,
            proposers=_proposers(request, engine, router),
        )
    )


def _proposers(request: GenerationRequest, engine: Engine, router: LoadedRouter | None) -> tuple[str, ...]:
    """The names of all that may draft for this request."""
    if request.policy.name == "full":
        return ()
    names = engine.proposer_names(router.ladder if router is not None else None)
    own = {PREDICTION: request.prediction_ids, GRAMMAR: request.constraint}
    return (*names, *(name for name, given in own.items() if given))


def _warnings(handle: GenerationHandle) -> list[str]:
    """What the caller should know of an answer, within bounds, because its own texts are in there."""
    unenforced = handle.unenforced
    warnings = [f"{what[:MAX_WARNING_CHARACTERS]} is not enforced" for what in unenforced[:MAX_WARNINGS]]
    return warnings + [f"{len(unenforced)} in all"] * (len(unenforced) > MAX_WARNINGS)


def _why_inexact(resume: inference_pb2.Resume, request: GenerationRequest, engine: Engine) -> str:
    """Why tokens after the resumed ones may differ from those of an uninterrupted run. Empty if they do not."""
    if not request.resumed_ids:
        return ""
    if resume.numerics_id != engine.numerics.id:
        began = resume.numerics_id[:64] or "unknown"
        return f"its numerics are {began}, and this worker's are {engine.numerics.id}"
    if request.policy.name == "relaxed":
        return "tokens of the policy relaxed depend on how they are drafted"
    return engine.numerics.why_not


def _handed_over() -> Unavailable:
    return Unavailable("the worker is stopping; the answer goes on elsewhere", reason="HANDED_OVER")
