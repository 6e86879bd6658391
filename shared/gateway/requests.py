"""Turns the bodies of the API into calls of `Generate`, one for each choice."""

from dataclasses import dataclass

from neap_client.inference.v1 import inference_pb2 as pb

from shared.gateway.body import parse_object, validated
from shared.gateway.errors import refused
from shared.gateway.schema import ChatRequest, CompletionRequest, DepthOptions, GenerationFields

# OpenAI's default for completions. Chats without a limit get the worker's default.
COMPLETION_TOKENS = 16
# OpenAI's default. An absent temperature would mean greedy decoding to a worker.
TEMPERATURE = 1.0
UINT64 = 2**64 - 1


@dataclass(frozen=True)
class Generation:
    """What a request asks for. `calls` has one message for each choice, in the order of their indices."""

    model: str
    is_chat: bool
    is_stream: bool
    includes_usage: bool
    calls: tuple[pb.GenerateRequest, ...]
    log_fields: dict[str, str]


def parse_generation(body: bytes, *, is_chat: bool, max_choices: int) -> Generation:
    """Parse and check a body. Raises InvalidInput: BAD_JSON, UNKNOWN_FIELD, UNSUPPORTED_FIELD, INVALID_INPUT, TOO_MANY_CHOICES."""
    fields = parse_object(body)
    prompts: list[pb.GenerateRequest]
    request: ChatRequest | CompletionRequest
    try:
        if is_chat:
            request = validated(ChatRequest, fields)
            prompts = [pb.GenerateRequest(chat=_chat(request))]
        else:
            request = validated(CompletionRequest, fields)
            prompts = _prompts(request, max_choices)
        shared_part = _common(request)
    except UnicodeEncodeError as error:
        raise refused("a text has half of a surrogate pair", reason="BAD_JSON") from error
    if request.stream_options is not None and not request.stream:
        raise refused("stream_options needs stream", "stream_options")
    num_choices = request.n or 1
    if len(prompts) * num_choices > max_choices:
        raise refused(
            f"the request has {len(prompts) * num_choices} choices (n times prompts); at most {max_choices} are allowed",
            "n",
            reason="TOO_MANY_CHOICES",
        )
    calls = []
    for prompt in prompts:
        prompt.MergeFrom(shared_part)
        for index in range(num_choices):
            call = pb.GenerateRequest()
            call.CopyFrom(prompt)
            if request.seed is not None:
                # Choices with the same seed would be the same.
                call.sampling.seed = (request.seed + index) & UINT64
            calls.append(call)
    options = request.stream_options
    user = request.safety_identifier or request.user
    return Generation(
        model=request.model,
        is_chat=is_chat,
        is_stream=bool(request.stream),
        includes_usage=bool(options and options.include_usage),
        calls=tuple(calls),
        log_fields={"user": user[:64]} if user else {},
    )


def _chat(request: ChatRequest) -> pb.Chat:
    chat = pb.Chat()
    for message in request.messages:
        content = message.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        # OpenAI's newer models call the role "system" "developer".
        role = "system" if message.role == "developer" else message.role
        chat.messages.append(pb.ChatMessage(role=role, content=text))
    return chat


def _prompts(request: CompletionRequest, max_choices: int) -> list[pb.GenerateRequest]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [pb.GenerateRequest(text=prompt)]
    if isinstance(prompt[0], int):
        return [pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))]
    if len(prompt) > max_choices:
        raise refused(
            f"there are {len(prompt)} prompts; at most {max_choices} are allowed",
            "prompt",
            reason="TOO_MANY_CHOICES",
        )
    return [
        pb.GenerateRequest(text=part)
        if isinstance(part, str)
        else pb.GenerateRequest(token_ids=pb.TokenIds(ids=part))
        for part in prompt
    ]


def _common(request: ChatRequest | CompletionRequest) -> pb.GenerateRequest:
    """Return the part of the call that all choices share, without the prompt and the seed."""
    call = pb.GenerateRequest(
        model_id=request.model,
        sampling=_sampling(request),
        stopping=_stopping(request),
        depth=_depth(request.neap or DepthOptions()),
        logprobs=_logprobs(request),
    )
    options = request.neap or DepthOptions()
    if options.router_version is not None and options.router_alias is not None:
        raise refused("router_version and router_alias exclude each other", "neap.router_alias")
    if options.router_version is not None:
        call.router.version = options.router_version
    if options.router_alias is not None:
        call.router.alias = options.router_alias
    return call


def _sampling(request: GenerationFields) -> pb.Sampling:
    return pb.Sampling(
        temperature=TEMPERATURE if request.temperature is None else request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
    )


def _stopping(request: ChatRequest | CompletionRequest) -> pb.Stopping:
    max_tokens = request.max_tokens
    if isinstance(request, CompletionRequest):
        max_tokens = COMPLETION_TOKENS if max_tokens is None else max_tokens
    elif request.max_completion_tokens is not None:
        if max_tokens is not None and max_tokens != request.max_completion_tokens:
            raise refused("max_tokens and max_completion_tokens differ", "max_completion_tokens")
        max_tokens = request.max_completion_tokens
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return pb.Stopping(
        max_tokens=max_tokens,
        stop_strings=stop,
        stop_token_ids=request.stop_token_ids or [],
        ignore_eos=bool(request.ignore_eos),
    )


def _depth(options: DepthOptions) -> pb.DepthPolicy:
    policy = options.policy or "exact"
    for name in ("threshold", "margin"):
        if getattr(options, name) is not None and policy != "relaxed":
            raise refused(f"{name} needs the policy relaxed", f"neap.{name}")
    if options.threshold is not None and options.margin is not None:
        raise refused("threshold and margin exclude each other", "neap.margin")
    if options.max_drafts is not None and policy != "exact":
        raise refused("max_drafts needs the policy exact", "neap.max_drafts")
    depth = pb.DepthPolicy(min_layers=options.min_layers or 0)
    if policy == "full":
        depth.full.SetInParent()
    elif policy == "relaxed":
        depth.relaxed.CopyFrom(pb.Relaxed(threshold=options.threshold, margin=options.margin))
    else:
        depth.exact.max_drafts = options.max_drafts or 0
        depth.exact.SetInParent()
    return depth


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.top_logprobs is not None and not request.logprobs:
        raise refused("top_logprobs needs logprobs", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None
