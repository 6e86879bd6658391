"""Renders a conversation with the model's own chat template."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from shared.chat.control_tokens import control_tokens
from shared.errors import InvalidInput

MAX_SAID_CHARACTERS = 256
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Chat:
    """`messages`, `tools` and `arguments` as templates take them: {"role", "content", ..}, {"type": "function", ..},
    and any values by name. `has_control_tokens`: control tokens in them have an effect, as those of the template do;
    otherwise they are text. `continues_last`: the prompt ends within the last message, which an assistant wrote."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    has_control_tokens: bool = False
    continues_last: bool = False

    def __post_init__(self) -> None:
        """Raises `InvalidInput` (also with reason UNKNOWN_ROLE)."""
        for message in self.messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
                raise InvalidInput('a message must be {"role": .., "content": ..}, with a text as its content')
            role = message.get("role")
            if role not in ROLES:
                raise InvalidInput(
                    f"a message's role is {str(role)[:64]!r}; it must be one of {', '.join(ROLES)}",
                    reason="UNKNOWN_ROLE",
                )

    @property
    def num_characters(self) -> int:
        """Characters of all that a client may make long. Raises `InvalidInput`."""
        more = [self.tools, self.arguments] if self.tools or self.arguments else []
        more += [message["tool_calls"] for message in self.messages if "tool_calls" in message]
        try:
            num_more = sum(len(json.dumps(each, ensure_ascii=False, default=str)) for each in more)
        except RecursionError as error:
            raise InvalidInput("the chat has values that are nested too deeply") from error
        texts = (text for message in self.messages for text in message.values() if isinstance(text, str))
        return sum(map(len, texts)) + num_more


def has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    return tokenizer is not None and bool(tokenizer.chat_template)


def render(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> str:
    """The prompt's text, for `encode_rendered`. Raises `InvalidInput` (reason CHAT_TEMPLATE_REFUSED; or another for
    arguments that are not the client's to set)."""
    reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map, "messages"}
    if clashes := reserved.intersection(chat.arguments):
        raise InvalidInput(f"the chat template's argument {min(clashes)} is set by the worker")
    messages, arguments = [dict(message) for message in chat.messages], dict(chat.arguments)
    tools: Any = [dict(tool) for tool in chat.tools]
    try:
        if not chat.has_control_tokens:
            mark = control_tokens(tokenizer).mark
            messages, tools, arguments = [_marked(message, mark) for message in messages], mark(tools), mark(arguments)
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=not chat.continues_last,
                continue_final_message=chat.continues_last,
                tokenize=False,
                **arguments,
            )
        )
    except Exception as error:  # a template is a program of its own and may raise anything
        # What it says itself, by raise_exception; other errors of Jinja are subclasses.
        said = f": {str(error)[:MAX_SAID_CHARACTERS]}" if type(error) is TemplateError else ""
        raise InvalidInput(
            f"the model's chat template refuses these messages{said}", reason="CHAT_TEMPLATE_REFUSED"
        ) from error


def _marked(message: Mapping[str, Any], mark: Callable[..., Any]) -> dict[str, Any]:
    """Roles have been checked. What an assistant says may have tags that its model has written itself."""
    may_have_tags = ("content", "reasoning_content") if message["role"] == "assistant" else ()
    return {name: value if name == "role" else mark(value, name in may_have_tags) for name, value in message.items()}


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The token ids of what `render` returns. Raises `InvalidInput` for a control token that the tokenizer has no other
    tokens for."""
    return control_tokens(tokenizer).encode(text)
