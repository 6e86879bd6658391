"""Renders a conversation with the model's own chat template."""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from shared.errors import InvalidInput

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Chat:
    """`messages`, `tools` and `arguments` as templates take them: {"role", "content", ..}, {"type": "function", ..},
    and any values by name."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

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
        """Of all that a client may make long."""
        more = [self.tools, self.arguments] if self.tools or self.arguments else []
        more += [message["tool_calls"] for message in self.messages if "tool_calls" in message]
        lengths = (len(json.dumps(each, ensure_ascii=False, default=str)) for each in more)
        return sum(len(message["content"]) for message in self.messages) + sum(lengths)


def has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    return tokenizer is not None and bool(tokenizer.chat_template)


def render(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[int]:
    """The token ids of the prompt. Raises `InvalidInput` (reason CHAT_TEMPLATE_REFUSED; or another for arguments that
    are not the client's to set)."""
    reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map, "messages"}
    if clashes := reserved.intersection(chat.arguments):
        raise InvalidInput(f"the chat template's argument {min(clashes)} is set by the worker")
    try:
        encoded: Any = tokenizer.apply_chat_template(
            [dict(message) for message in chat.messages],
            tools=[dict(tool) for tool in chat.tools] or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **chat.arguments,
        )
    except Exception as error:  # a template is a program of its own and may raise anything
        raise InvalidInput(
            "the model's chat template refuses these messages", reason="CHAT_TEMPLATE_REFUSED"
        ) from error
    return list(encoded["input_ids"])
