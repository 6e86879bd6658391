"""What a chat of neap.inference.v1 asks of a model: a prompt, and what its answer must be and is read as."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from neap_client.inference.v1 import inference_pb2 as pb
from pydantic_core import from_json

from shared.chat.channels import TOKENS, ChannelParser, has_channels
from shared.chat.formats import (
    NAME_CHARACTERS,
    CallFormat,
    begins_in_thought,
    call_format,
    shown_special_ids,
    thinking_tags,
)
from shared.chat.parser import AnswerParser, MessageParser
from shared.chat.template import Chat
from shared.constraints.constraint import Constraint, MessageConstraint
from shared.engine.request.prompt import check_pieces
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

MAX_TOOLS = 128
MAX_NAME_CHARACTERS = 128
MAX_TEMPLATE_BYTES = 16 * 1024


class PreparedChat:
    """`has_control_tokens` as in `Chat`. Raises `InvalidInput` (also with the reasons TOOLS_NOT_SUPPORTED,
    NO_CHAT_TEMPLATE) and `PromptTooLong`."""

    def __init__(self, chat: pb.Chat, loaded: LoadedModel, *, has_control_tokens: bool = False) -> None:
        self._chat, self._loaded, self._has_control_tokens = chat, loaded, has_control_tokens
        check_pieces(loaded, len(chat.messages), "messages")
        check_pieces(loaded, sum(len(message.tool_calls) for message in chat.messages), "calls of tools")
        self._has_channels = has_channels(loaded)
        self._thinking = None if self._has_channels else thinking_tags(loaded)
        self._choice = chat.tool_choice.WhichOneof("choice") or "auto"
        shows_tools = bool(chat.tools) and self._choice != "none"
        # How calls are written, in the prompt or in the answer.
        self._format: CallFormat | None = None
        if shows_tools or any(m.role == "tool" or m.tool_calls for m in chat.messages):
            self._format = call_format(loaded)
        self._tools = _tools(chat.tools) if shows_tools else {}
        if self._format and any(self._format.middle[0] in name for name in self._tools):
            raise InvalidInput(
                f"this model takes {self._format.middle[0]!r} for the end of a tool's name", metadata={"field": "tools"}
            )
        if self._choice == "name" and chat.tool_choice.name not in self._tools:
            raise InvalidInput(
                "the tool that is to be called is not one of the tools", metadata={"field": "tool_choice"}
            )
        if self._choice == "required" and not self._tools:
            raise InvalidInput("there are no tools that could be called", metadata={"field": "tool_choice"})
        # The message that the answer goes on with.
        self._begun = chat.messages[-1] if chat.continues_last_message and chat.messages else pb.ChatMessage()
        is_text = self._begun.content.strip() and not self._begun.tool_calls
        if chat.continues_last_message and not (self._begun.role == "assistant" and is_text):
            field = f"messages[{max(0, len(chat.messages) - 1)}]"
            raise InvalidInput(f"{field}: only text of an assistant can be continued", metadata={"field": field})

    @cached_property
    def prompt(self) -> Chat:
        messages: list[dict[str, Any]] = []
        # By the id of a call so far, the name of its tool.
        called: dict[str, str] = {}
        for i, message in enumerate(self._chat.messages):
            messages.append(self._message(message, i, called))
            called.update((call.id, call.name) for call in message.tool_calls)
        return Chat(
            messages,
            list(self._tools.values()),
            _object(self._chat.template_arguments, "template_arguments", MAX_TEMPLATE_BYTES)
            if self._chat.template_arguments
            else {},
            has_control_tokens=self._has_control_tokens,
            continues_last=self._chat.continues_last_message,
        )

    def _in_thought(self, prompt_ids: Sequence[int]) -> bool:
        begin, end = (self._begun.content.rfind(tag) for tag in self._thinking or ("", ""))
        return begin > end or begins_in_thought(self._loaded, prompt_ids)

    @property
    def shown_special_ids(self) -> frozenset[int]:
        if self._has_channels:
            return shown_special_ids(self._loaded, TOKENS)
        texts = list(self._thinking or ())
        if self._tools and self._format:
            texts += [self._format.begin, self._format.middle, self._format.between or ""]
        return shown_special_ids(self._loaded, texts)

    def constraint(self, answer: Constraint | None, prompt_ids: Sequence[int]) -> Constraint | MessageConstraint | None:
        """What the answer must be, if its text must be `answer`."""
        if not self._tools and (answer is None or not (self._thinking or self._has_channels)):
            return answer
        has_tag = self._has_channels or bool(self._format and self._format.tag)
        if self._tools and answer and not has_tag:
            raise InvalidInput(
                "this model has no tag for calls, so its answers can have either tools or a constraint",
                metadata={"field": "constraint"},
            )
        return MessageConstraint(
            thinking=self._thinking,
            in_thought=self._in_thought(prompt_ids),
            answer=None if self._choice in ("required", "name") else answer,
            calls=self._format if self._tools else None,
            tools=tuple(
                (name, json.dumps(tool["function"]["parameters"], ensure_ascii=False))
                for name, tool in self._tools.items()
            ),
            named=self._chat.tool_choice.name,
            strict_tools=frozenset(tool.name for tool in self._chat.tools if tool.strict),
            must_call=self._choice in ("required", "name"),
            may_repeat=not self._chat.single_tool_call and self._choice != "name",
            channels=self._has_channels,
            in_text=self._chat.continues_last_message,
        )

    def parser(self, prompt_ids: Sequence[int], constraint: Constraint | MessageConstraint | None) -> AnswerParser:
        """`constraint`: of the answer, as `constraint` makes it."""
        if self._has_channels:
            return ChannelParser(has_tools=bool(self._tools), in_text=self._chat.continues_last_message)
        has_grammar = isinstance(constraint, MessageConstraint) and constraint.answer is not None
        return MessageParser(
            self._thinking,
            in_thought=self._in_thought(prompt_ids),
            calls=self._format if self._tools else None,
            has_grammar=has_grammar,
            bare_tools=[] if has_grammar or self._choice != "auto" else list(self._tools),
            may_repeat=not self._chat.single_tool_call,
        )

    def _message(self, message: pb.ChatMessage, place: int, called: Mapping[str, str]) -> dict[str, Any]:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning and self._has_channels:
            # Their templates know it by another name, and beside calls allow a text or reasoning.
            with_text = [message.reasoning, *([message.content] if message.tool_calls and message.content else [])]
            fields["thinking"] = "\n\n".join(with_text)
            if message.tool_calls:
                fields["content"] = ""
        elif message.reasoning:
            fields["reasoning_content"] = message.reasoning
        if message.tool_call_id:
            fields["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in called:  # some templates name the tool of a result
                fields["name"] = called[message.tool_call_id]
        if message.tool_calls:
            assert self._format is not None
            where = f"messages[{place}].tool_calls"
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments or "{}"
                        if self._format.takes_text
                        else _arguments(call.arguments, f"{where}.arguments"),
                    },
                }
                for call in message.tool_calls
            ]
        return fields


def _tools(tools: Sequence[pb.Tool]) -> dict[str, Any]:
    """By name, as templates take them."""
    if len(tools) > MAX_TOOLS:
        raise InvalidInput(f"{len(tools)} tools; at most {MAX_TOOLS} are allowed")
    by_name: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        if not re.fullmatch(f"{NAME_CHARACTERS}{{1,{MAX_NAME_CHARACTERS}}}", tool.name) or tool.name in by_name:
            raise InvalidInput(
                f"a tool's name is {tool.name[:64]!r}; it must have 1 to {MAX_NAME_CHARACTERS} of a-z, A-Z, 0-9, _, -, "
                "., : and /, and be its own",
                metadata={"field": f"tools[{i}].name"},
            )
        parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
        if tool.parameters:
            parameters = _object(tool.parameters, f"tools[{i}].parameters")
            if parameters.setdefault("type", "object") != "object":
                raise InvalidInput(
                    "the parameters of a tool must be those of an object", metadata={"field": f"tools[{i}].parameters"}
                )
        told = {"name": tool.name, "description": tool.description, "parameters": parameters}
        by_name[tool.name] = {"type": "function", "function": told}
    return by_name


def _arguments(text: str, field: str) -> dict[str, Any]:
    """The arguments of a call that was made: as much of them as there is, where the answer's end has cut them."""
    try:
        value = from_json(text, allow_partial="trailing-strings") if text.strip() else None
    except ValueError as error:
        raise _no_json(field) from error
    return {} if value is None else _checked_object(value, field)


def _object(text: str, field: str, max_bytes: int | None = None) -> dict[str, Any]:
    if max_bytes is not None and len(text.encode()) > max_bytes:
        raise InvalidInput(f"{field} has more than {max_bytes} bytes", metadata={"field": field})
    try:
        return _checked_object(json.loads(text), field)
    except (ValueError, RecursionError) as error:
        raise _no_json(field) from error


def _checked_object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{field} must be a JSON object", metadata={"field": field})
    return value


def _no_json(field: str) -> InvalidInput:
    return InvalidInput(f"{field} is no JSON", metadata={"field": field})
