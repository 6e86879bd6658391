"""The body of /v1/responses, and the request of a chat that it is."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from neap_engine.gateway.errors import refused
from neap_engine.gateway.schema import (
    NEUTRAL,
    UINT32,
    AllowedTools,
    AllowedToolsChoice,
    CalledFunction,
    ChatRequest,
    Function,
    FunctionName,
    Items,
    Message,
    NamedSchema,
    NamedTool,
    ResponseFormat,
    Returned,
    SamplingFields,
    Strict,
    Tool,
    ToolCall,
)

LOGPROBS = "message.output_text.logprobs"


class InputPart(Returned):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


Content = str | Items[InputPart]


class InputMessage(Returned):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class InputCall(Returned):
    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = None


class InputResult(Returned):
    call_id: str
    output: Content


class InputReasoning(Returned):
    """`summary` counts where there is no `content`. Encrypted content is not read."""

    content: Items[InputPart] | None = None
    summary: Items[InputPart] | None = None


class InputReference(Returned):
    unsupported: ClassVar = {"id": ()}


KINDS = {
    "message": "InputMessage",
    "function_call": "InputCall",
    "function_call_output": "InputResult",
    "reasoning": "InputReasoning",
    "item_reference": "InputReference",
}


def _kind(item: Any) -> str | None:
    kind = item.get("type") or "message" if isinstance(item, dict) else None
    return KINDS.get(kind) if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[InputCall, Tag("InputCall")]
    | Annotated[InputResult, Tag("InputResult")]
    | Annotated[InputReasoning, Tag("InputReasoning")]
    | Annotated[InputReference, Tag("InputReference")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message=f"an item is an object whose type is one of {', '.join([*KINDS][:-1])}",
    ),
]


class FunctionTool(Strict):
    unsupported: ClassVar = {"allowed_callers": (["direct"],), "defer_loading": (False,), "output_schema": (dict,)}

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: str


class AllowedFunctions(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[NamedFunction] = Field(min_length=1)


class OutputFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class OutputText(Strict):
    unsupported: ClassVar = {"verbosity": (str,)}

    format: OutputFormat | None = None


class ReasoningOptions(Strict):
    unsupported = dict.fromkeys(("context", "generate_summary", "mode", "summary"), (str,))

    effort: str | None = Field(default=None, max_length=64)


class ObfuscationOptions(Strict):
    include_obfuscation: bool | None = None


# What an answer repeats of its request, and what absent fields mean.
ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "user": None,
}


class ResponsesRequest(SamplingFields):
    """The body of /v1/responses. What would need a stored answer is refused."""

    unsupported = NEUTRAL | {
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (int,),
        "previous_response_id": (),
        "prompt": (),
        "reasoning_effort": (str,),
        "truncation": ("disabled",),
    }

    input: str | Items[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=UINT32)
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: OutputText | None = None
    reasoning: ReasoningOptions | None = None
    include: Items[str] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stream_options: ObfuscationOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def as_chat(self) -> ChatRequest:
        """Raises InvalidInput for an input without anything, and a format without its schema."""
        shared = {name: getattr(self, name) for name in (*SamplingFields.model_fields, "chat_template_kwargs")}
        messages = [*_messages(self.instructions, self.input)]
        if not messages:
            raise refused("input: there is nothing to answer", "input")
        logprobs = LOGPROBS in (self.include or ())
        if self.top_logprobs and not logprobs:
            raise refused(f"top_logprobs needs {LOGPROBS} in include", "top_logprobs")
        return ChatRequest.model_construct(
            **shared,
            messages=messages,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            max_completion_tokens=self.max_output_tokens,
            tools=[_tool(tool) for tool in self.tools or []],
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text.format if self.text else None),
            logprobs=logprobs,
            top_logprobs=self.top_logprobs,
        )


# The fields of an assistant's message, in the order in which a model writes them.
TURN = ("reasoning_content", "content", "tool_calls")


def _messages(instructions: str | None, items: str | list[InputItem]) -> Iterator[Message]:
    """What an assistant has thought, said and called in a row is one message, as a template expects it."""
    if instructions:
        yield Message(role="system", content=instructions)
    if isinstance(items, str):
        yield Message(role="user", content=items)
        return
    turn: dict[str, list[Any]] = {}
    for item in items:
        name, part = _part_of_turn(item)
        last = next(reversed(turn), "")
        # Calls may be several, and so may pieces of reasoning.
        if turn and not (name and (TURN.index(name) > TURN.index(last) or name == last != "content")):
            yield _turn(turn)
            turn = {}
        if name:
            turn.setdefault(name, []).append(part)
        elif isinstance(item, InputResult):
            yield Message(role="tool", tool_call_id=item.call_id, content=_joined(item.output))
        elif isinstance(item, InputMessage):
            yield Message(role=item.role, content=_joined(item.content))
    if turn:
        yield _turn(turn)


def _turn(parts: dict[str, list[Any]]) -> Message:
    fields: dict[str, Any] = {name: each if name == "tool_calls" else "".join(each) for name, each in parts.items()}
    return Message(role="assistant", **fields)


def _part_of_turn(item: InputItem) -> tuple[str, Any]:
    """The field of an assistant's message that an item is a part of, and the part; empty for other items."""
    if isinstance(item, InputReasoning):
        return "reasoning_content", _joined(item.content or item.summary or "")
    if isinstance(item, InputCall):
        function = CalledFunction(name=item.name, arguments=item.arguments)
        return "tool_calls", ToolCall(id=item.call_id, function=function)
    if isinstance(item, InputMessage) and item.role == "assistant":
        return "content", _joined(item.content)
    return "", None


def _joined(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: FunctionTool) -> Tool:
    return Tool(type="function", function=Function(**tool.model_dump(exclude={"type"})))


def _choice(choice: str | NamedFunction | AllowedFunctions | None) -> Any:
    if isinstance(choice, AllowedFunctions):
        tools = [_choice(tool) for tool in choice.tools]
        return AllowedToolsChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=tools))
    if isinstance(choice, NamedFunction):
        return NamedTool(type="function", function=FunctionName(name=choice.name))
    return choice


def _format(wanted: OutputFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(type=wanted.type, schema=wanted.schema_)
    if wanted.schema_ is None:
        raise refused("the type json_schema needs text.format.schema", "text.format.schema")
    schema = NamedSchema(name="answer", schema=wanted.schema_, strict=wanted.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)
