"""Turns the bodies of the API into calls of `Generate`, one for each choice."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neap_client.affinity import prefix_key
from neap_client.fields import FIELDS
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import DEPTH, depth_policy

from neap_engine.gateway.body import parse_object, validated
from neap_engine.gateway.errors import refused
from neap_engine.gateway.responses_schema import ECHOED, ResponsesRequest
from neap_engine.gateway.schema import (
    AllowedToolsChoice,
    ChatRequest,
    CompletionRequest,
    DepthOptions,
    Function,
    Message,
    NamedTool,
    ResponseFormat,
    SamplingFields,
    StructuredOutputs,
    TemplateFields,
    TextPart,
    Tool,
    ToolCall,
)
from shared.errors import InvalidInput

# OpenAI's default for completions. Chats without a limit get the worker's default.
COMPLETION_TOKENS = 16
# OpenAI's default. An absent temperature would mean greedy decoding to a worker.
TEMPERATURE = 1.0
# Below this a worker's scores would overflow; the most probable token is sure long before.
LEAST_TEMPERATURE = 1e-6
UINT64 = 2**64 - 1
# Fields of DepthOptions that are arguments of `depth_policy`, and those of its others that a call has as they are.
# OpenAI's further efforts, as the nearest of the three that templates know.
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}
POLICY = {"policy", *(name for kind in DEPTH for name in FIELDS[kind])}
CALL = {*FIELDS["GenerateRequest"]} & {*DepthOptions.model_fields}
SAMPLING = {*FIELDS["Sampling"]} - {"seed"}
STOPPING = {*FIELDS["Stopping"]} & {*SamplingFields.model_fields}


@dataclass(frozen=True)
class RequestedGeneration:
    """What a request asks for. `prompts` are serialized messages GenerateRequest, each of which is called `num_choices`
    times, and `prefixes` their prefix keys. `continues_usage`: every chunk of a stream has the usage so far. `echo`:
    what a response repeats of its request, in JSON; empty at other endpoints."""

    model: str
    is_chat: bool
    echo: bytes
    is_stream: bool
    includes_usage: bool
    continues_usage: bool
    prompts: tuple[bytes, ...]
    prefixes: tuple[str, ...]
    num_choices: int
    seed: int | None
    log_fields: dict[str, str]

    @property
    def num_bytes(self) -> int:
        """What the calls take on their way to the workers, all together."""
        return self.num_choices * sum(map(len, self.prompts))

    def calls(self) -> list[tuple[bytes, str]]:
        """Return a call and its prefix key for each choice of the response, in the order of their indices."""
        seeds = [b""] * self.num_choices
        if self.seed is not None:
            # Choices with the same seed would be the same.
            seeds = [_seeded(self.seed + index) for index in range(self.num_choices)]
        prompts = zip(self.prompts, self.prefixes, strict=True)
        return [(prompt + seed, prefix) for prompt, prefix in prompts for seed in seeds]


def parse_generation(
    body: bytes, kind: type[SamplingFields], *, max_choices: int, model_defaults: bool = True
) -> RequestedGeneration:
    """Parse and check a body of one of the three kinds. `model_defaults`: whether the model's generation_config says
    what the request leaves open, or OpenAI's API does. Raises InvalidInput: BAD_JSON, UNKNOWN_FIELD, UNSUPPORTED_FIELD,
    INVALID_INPUT, TOO_MANY_CHOICES."""
    fields = parse_object(body)
    echo = b""
    try:
        request = validated(kind, fields)
        if isinstance(request, ResponsesRequest):
            request = request.as_chat()
            given = {name: fields[name] for name in ECHOED if fields.get(name) is not None}
            echo = json_text(ECHOED | given).encode()
        assert isinstance(request, ChatRequest | CompletionRequest)
        prompts = [{"chat": _chat(request)}] if isinstance(request, ChatRequest) else _prompts(request, max_choices)
        calls = [_call(request, model_defaults=model_defaults, **prompt) for prompt in prompts]
    except UnicodeEncodeError as error:
        raise refused("a text has half of a surrogate pair", reason="BAD_JSON") from error
    num_choices = request.n or 1
    if len(calls) * num_choices > max_choices:
        raise refused(
            f"the request has {len(calls) * num_choices} choices (n times prompts); at most {max_choices} are allowed",
            "n",
            reason="TOO_MANY_CHOICES",
        )
    options = request.stream_options
    user = request.safety_identifier or request.user
    return RequestedGeneration(
        model=request.model,
        is_chat=isinstance(request, ChatRequest),
        echo=echo,
        is_stream=bool(request.stream),
        includes_usage=bool(options and options.include_usage),
        continues_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        prompts=tuple(call.SerializeToString() for call in calls),
        prefixes=tuple(map(prefix_key, calls)),
        num_choices=num_choices,
        seed=request.seed,
        log_fields={"user": user[:64]} if user else {},
    )


def _seeded(seed: int) -> bytes:
    """Return a message with nothing but a seed. It is merged with the message before it."""
    return pb.GenerateRequest(sampling=pb.Sampling(seed=seed & UINT64)).SerializeToString()


def _chat(request: ChatRequest) -> pb.Chat:
    tools, choice = _allowed(request)
    chat = chat_of(request.messages, tools, request)
    chat.single_tool_call = request.parallel_tool_calls is False
    if (wanted := _tool_choice(choice)) is not None:
        chat.tool_choice.CopyFrom(wanted)
    return chat


def chat_of(messages: Sequence[Message], tools: Sequence[Tool], template: TemplateFields) -> pb.Chat:
    """Raises InvalidInput for messages without what their role must have."""
    arguments, effort = template.chat_template_kwargs, template.reasoning_effort
    if effort is not None:
        arguments = {"reasoning_effort": _EFFORTS.get(effort, effort), **(arguments or {})}
    chat = pb.Chat(
        tools=[_tool(tool.function) for tool in tools],
        template_arguments=json_text(arguments),
        continues_last_message=bool(template.continue_final_message),
    )
    for i, message in enumerate(messages):
        is_assistant = message.role == "assistant"
        for name, is_misplaced in (
            ("content", message.content is None and message.role not in ("assistant", "tool")),
            ("tool_calls", message.tool_calls and not is_assistant),
            ("tool_call_id", (message.tool_call_id is None) == (message.role == "tool")),
        ):
            if is_misplaced:
                field = f"messages[{i}].{name}"
                verb = "may not have" if getattr(message, name) else "must have"
                raise refused(f"{field}: a message of this kind {verb} {name}", field)
        calls = [_tool_call(call) for call in message.tool_calls or []]
        chat.messages.add(
            # OpenAI's newer models call the role "system" "developer".
            role="system" if message.role == "developer" else message.role,
            content=_text(message.content or "", "\n"),
            reasoning=message.reasoning_content or message.reasoning or "",
            tool_calls=calls,
            tool_call_id=message.tool_call_id or "",
        )
    return chat


def _tool_call(call: ToolCall) -> pb.ToolCall:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else json_text(arguments)
    return pb.ToolCall(id=call.id, name=call.function.name, arguments=text)


def _allowed(request: ChatRequest) -> tuple[Sequence[Tool], str | NamedTool | None]:
    """The tools that the model gets, and whether it calls them. Raises InvalidInput."""
    tools, choice = request.tools or [], request.tool_choice
    if not isinstance(choice, AllowedToolsChoice):
        return tools, choice
    names = {tool.function.name for tool in choice.allowed_tools.tools}
    if unknown := names - {tool.function.name for tool in tools}:
        raise refused(f"there is no tool {min(unknown)[:128]!r}", "tool_choice.allowed_tools.tools")
    return [tool for tool in tools if tool.function.name in names], choice.allowed_tools.mode


def _tool(function: Function) -> pb.Tool:
    return pb.Tool(
        name=function.name,
        description=function.description or "",
        parameters=json_text(function.parameters),
        strict=bool(function.strict),
    )


def _tool_choice(choice: str | NamedTool | None) -> pb.ToolChoice | None:
    if isinstance(choice, NamedTool):
        return pb.ToolChoice(name=choice.function.name)
    if choice == "none":
        return pb.ToolChoice(none=pb.NoTool())
    return pb.ToolChoice(required=pb.AnyTool()) if choice == "required" else None


def _text(content: str | list[TextPart], between: str) -> str:
    return content if isinstance(content, str) else between.join(part.text for part in content)


def _prompts(request: CompletionRequest, max_choices: int) -> list[dict[str, Any]]:
    prompt = request.prompt
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    if len(prompts) > max_choices:
        raise refused(
            f"there are {len(prompts)} prompts; at most {max_choices} are allowed", "prompt", reason="TOO_MANY_CHOICES"
        )
    return [{"text": part} if isinstance(part, str) else {"token_ids": pb.TokenIds(ids=part)} for part in prompts]


def _call(request: ChatRequest | CompletionRequest, *, model_defaults: bool, **prompt: Any) -> pb.GenerateRequest:
    """Return what all choices of a prompt share: the call without a seed."""
    call = pb.GenerateRequest(
        **prompt,
        model_id=request.model,
        sampling=_sampling(request),
        stopping=_stopping(request),
        depth=_depth(request.neap or DepthOptions()),
        logprobs=_logprobs(request),
        constraint=constraint(request.response_format, request.structured_outputs),
    )
    if model_defaults:
        call.model_defaults = True
    elif not call.sampling.HasField("temperature"):
        call.sampling.temperature = TEMPERATURE
    if isinstance(request, CompletionRequest) and request.echo:
        call.echo = True
        if request.logprobs is not None:
            call.prompt_logprobs = request.logprobs
    if request.prediction is not None:
        # Parts of a message are lines; those of a prediction are one text.
        call.prediction.text = _text(request.prediction.content, "")
    options = request.neap or DepthOptions()
    for name, value in options.model_dump(include=CALL, exclude_none=True).items():
        setattr(call, name, value)
    if options.learn is not None:
        call.learn = pb.LEARN_NEVER
    if options.router_version is not None and options.router_alias is not None:
        raise refused("router_version and router_alias exclude each other", "neap.router_alias")
    if options.router_version is not None:
        call.router.version = options.router_version
    if options.router_alias is not None:
        call.router.alias = options.router_alias
    return call


def _sampling(request: SamplingFields) -> pb.Sampling:
    """Return all fields but the seed, which each choice has for itself. They have the same names in a body."""
    fields = request.model_dump(include=SAMPLING, exclude_none=True)
    if "bad_words" in fields:
        fields["bad_words"] = [pb.BadWord(text=word) for word in fields["bad_words"]]
    # Nothing but the most probable token is left.
    if fields.get("temperature", TEMPERATURE) < LEAST_TEMPERATURE or fields.get("top_p") == 0:
        fields["temperature"] = 0
    if fields.get("top_p") == 0:
        del fields["top_p"]
    return pb.Sampling(**fields)


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
        **request.model_dump(include=STOPPING, exclude_none=True),
    )


def _depth(options: DepthOptions) -> pb.DepthPolicy:
    fields: dict[str, Any] = {"policy": "exact", **options.model_dump(include=POLICY, exclude_none=True)}
    try:
        depth = depth_policy(**fields)
    except InvalidInput as error:
        raise refused(error.message, f"neap.{error.metadata['field']}") from error
    # To the client 0, the worker's choice, is as good as absent.
    if "max_drafts" in fields and not depth.HasField("exact"):
        raise refused(f"max_drafts applies to the policy exact, not to {options.policy}", "neap.max_drafts")
    return depth


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.top_logprobs and not request.logprobs:
        raise refused("top_logprobs needs logprobs", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def constraint(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> pb.Constraint | None:
    """Raises InvalidInput."""
    if outputs is None:
        return None if response_format is None else _of_format(response_format)
    if response_format is not None and response_format.type != "text":
        raise refused("structured_outputs and response_format exclude each other", "structured_outputs")
    return _of_outputs(outputs)


def json_text(value: Any) -> str:
    """Empty for nothing, which the worker understands. Raises InvalidInput (BAD_JSON) for what is nested too deeply."""
    try:
        return "" if value is None else json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise refused("a value is nested too deeply", reason="BAD_JSON") from error


def _of_format(wanted: ResponseFormat) -> pb.Constraint | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _of_schema(wanted.schema_, is_strict=False)
    if wanted.json_schema is None:
        field = "response_format.json_schema"
        raise refused(f"the type json_schema needs {field}", field)
    return _of_schema(wanted.json_schema.schema_, is_strict=bool(wanted.json_schema.strict))


def _of_schema(schema: dict[str, Any] | None, *, is_strict: bool) -> pb.Constraint:
    if schema is None:
        return pb.Constraint(json_object=pb.JsonObject())
    return pb.Constraint(json_schema=json_text(schema), strict=is_strict)


def _of_outputs(outputs: StructuredOutputs) -> pb.Constraint | None:
    given = outputs.model_dump(exclude_none=True)
    if not given.get("json_object", True):
        del given["json_object"]
    if len(given) > 1:
        raise refused(f"{' and '.join(given)} exclude each other", "structured_outputs")
    if outputs.regex is not None:
        return pb.Constraint(regex=outputs.regex)
    if outputs.grammar is not None:
        return pb.Constraint(lark=outputs.grammar)
    if outputs.choice is not None:
        return pb.Constraint(choice=pb.Choice(texts=outputs.choice))
    if isinstance(outputs.json_, str):
        return pb.Constraint(json_schema=outputs.json_)
    return _of_schema(outputs.json_, is_strict=False) if given else None
