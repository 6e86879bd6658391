"""How a model writes reasoning and calls of tools: what its chat template makes of a message that has them."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from shared.chat.template import has_template
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

NAME_CHARACTERS = "[a-zA-Z0-9_.:/-]"
# Templates of Mistral's models take no other ids. In a format, `ID` stands for one that the model makes up.
NUM_ID_CHARACTERS = 9
ID = "\0"
# How models begin and end what they think. No template says it in another way that is known.
THINKING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))

_NAMES, _IDS, _TEXT = ("zq_tool", "zq_other"), ("zq0calls0", "zq0calls1"), "zq"
_ARGUMENTS = {"zq_key": "zq value"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": _TEXT,
            "parameters": {
                "type": "object",
                "properties": {"zq_key": {"type": "string", "description": _TEXT}},
                "required": ["zq_key"],
            },
        },
    }
    for name in _NAMES
]


@dataclass(frozen=True)
class CallFormat:
    """Calls are `begin` name `middle` arguments (`between` name `middle` arguments)* `end`, where arguments are a JSON
    object.

    `between`: None if a message has one call. `tag`: how `begin` starts, if no other text of an answer has that; empty
    if calls are known only by all of `begin`, at the very start. `takes_text`: whether the template takes arguments as
    JSON text instead of an object.
    """

    begin: str
    middle: str
    between: str | None
    end: str
    tag: str
    takes_text: bool


def thinking_tags(loaded: LoadedModel) -> tuple[str, str] | None:
    """How the model's reasoning begins and ends; None if it does not think."""
    tokenizer = loaded.tokenizer
    if tokenizer is None or not has_template(tokenizer):
        return None
    template, vocabulary = str(tokenizer.chat_template), tokenizer.get_added_vocab()
    known = (tags for tags in THINKING_TAGS if tags[1] in template or vocabulary.keys() >= {*tags})
    return next(known, None)


def begins_in_thought(loaded: LoadedModel, prompt_ids: Iterable[int]) -> bool:
    """Whether the prompt has begun the reasoning already."""
    tags = thinking_tags(loaded)
    if tags is None or loaded.tokenizer is None:
        return False
    last = list(prompt_ids)[-2 * len(tags[0]) :]
    return str(loaded.tokenizer.decode(last)).rstrip().endswith(tags[0])


def call_format(loaded: LoadedModel) -> CallFormat:
    """Raises `InvalidInput` (reasons NO_CHAT_TEMPLATE, TOOLS_NOT_SUPPORTED)."""
    if loaded.tokenizer is None or not has_template(loaded.tokenizer):
        raise InvalidInput("this model has no chat template", reason="NO_CHAT_TEMPLATE")
    ends = frozenset(str(loaded.tokenizer.decode([token])) for token in loaded.eos_token_ids)
    probed = _probe(loaded.tokenizer, str(loaded.tokenizer.chat_template), ends)
    if isinstance(probed, str):
        raise InvalidInput(
            f"this model cannot be given tools: its chat template {probed}", reason="TOOLS_NOT_SUPPORTED"
        )
    return probed


def shown_special_ids(loaded: LoadedModel, texts: Iterable[str]) -> frozenset[int]:
    """Special tokens whose text is in one of `texts`, which an answer must show to be understood."""
    if loaded.tokenizer is None:
        return frozenset()
    texts = list(texts)
    return frozenset(
        token_id
        for token_id, token in loaded.tokenizer.added_tokens_decoder.items()
        if token.special and any(token.content in text for text in texts)
    )


@lru_cache(maxsize=16)
def _probe(tokenizer: PreTrainedTokenizerBase, template: str, ends: frozenset[str]) -> CallFormat | str:
    """The format, or why there is none. `template`: of the tokenizer, whose change makes another result."""
    plain = [_user(), {"role": "assistant", "content": _TEXT}, _user()]
    try:
        shown = _rendered(tokenizer, plain, _TOOLS)
        if shown == _rendered(tokenizer, plain, None):
            return "does not show them to it"
    except Exception:  # a template is a program of its own and may raise anything
        return "refuses them"
    for takes_text in (False, True):
        arguments = json.dumps(_ARGUMENTS) if takes_text else _ARGUMENTS
        try:
            with_one, with_two = (_rendered(tokenizer, _calling(arguments, number), _TOOLS) for number in (1, 2))
        except Exception:
            try:  # one that allows a single call
                with_one, with_two = _rendered(tokenizer, _calling(arguments, 1), _TOOLS), ""
            except Exception:
                continue
        # Where the assistant's turn has a call instead of text.
        start = next(i for i, (a, b) in enumerate(zip(shown, with_one, strict=False)) if a != b)
        begin, name, rest = with_one[start:].partition(_NAMES[0])
        middle, tail = _around_arguments(rest)
        cuts = [tail.index(end) for end in ends if end in tail]
        if not name or not middle or re.match(r"[\w-]", middle) or not cuts:
            continue
        begin = begin.lstrip()
        return CallFormat(
            begin=begin,
            middle=middle,
            between=_between(with_two[start:], middle, ends),
            end=tail[: min(cuts)].replace(_IDS[0], ID),
            tag=_tag(tokenizer, begin),
            takes_text=takes_text,
        )
    return "does not write calls as a name and JSON"


def _user() -> dict[str, Any]:
    return {"role": "user", "content": "Zq?"}


def _calling(arguments: Any, number: int) -> list[dict[str, Any]]:
    """A conversation with that many calls at once, which goes on: some templates treat last messages differently."""
    called = list(zip(_NAMES, _IDS, strict=True))[:number]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, call_id in called
    ]
    results = [{"role": "tool", "tool_call_id": call_id, "name": name, "content": _TEXT} for name, call_id in called]
    return [
        _user(),
        {"role": "assistant", "content": "", "tool_calls": calls},
        *results,
        {"role": "assistant", "content": _TEXT},
        _user(),
    ]


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))


def _around_arguments(text: str) -> tuple[str, str]:
    """What is before and after the first JSON object of `text`; nothing unless it is the arguments."""
    start = text.find("{")
    try:
        arguments, end = json.JSONDecoder().raw_decode(text, max(start, 0))
    except json.JSONDecodeError:
        return "", ""
    return (text[:start], text[end:]) if arguments == _ARGUMENTS else ("", "")


def _between(calls: str, middle: str, ends: frozenset[str]) -> str | None:
    """What is written from one call's arguments to the name of the next; None if each is in a message of its own."""
    _, _, rest = calls.partition(_NAMES[0])
    _, tail = _around_arguments(rest)
    between, name, rest = tail.partition(_NAMES[1])
    if not name or not rest.startswith(middle) or any(end in between for end in ends):
        return None
    return between.replace(_IDS[0], ID)


def _tag(tokenizer: PreTrainedTokenizerBase, begin: str) -> str:
    added = [token for token in tokenizer.get_added_vocab() if begin.startswith(token)]
    return max(added, key=len, default="") or begin.partition("{")[0].strip()
