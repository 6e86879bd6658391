"""The grammar of a chat's answer: reasoning, text, and calls of tools.

Text is free up to the tag that begins calls: a token that no other text has, or a lazy lexeme of the library, which
takes the tag as soon as it is there.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from shared.chat.channels import (
    CHANNEL,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MESSAGE,
    REASONING,
    RECIPIENT,
    REMARK,
    ROLE,
    START,
)
from shared.chat.formats import ID, NUM_ID_CHARACTERS
from shared.constraints.constraint import Constraint, MessageConstraint

ANY = r"/(.|\n)*/"
# What may stand between the last call and the end. It is bounded: some models would go on with white space for ever.
SPACE = r"/[ \r\n]{1,4}/"


def message_grammar(
    message: MessageConstraint, grammar_of: Callable[[Constraint], str], special: Mapping[str, int]
) -> str:
    """In the library's own format, with a grammar of its own for each schema. `special`: tokens that are no text."""
    parts = _Parts(grammar_of, special)
    rules = _of_channels(message, parts) if message.channels else _of_tags(message, parts)
    parts.grammars[0]["lark_grammar"] = "\n".join(rules)
    return json.dumps({"grammars": parts.grammars})


class _Parts:
    """What rules are made of."""

    def __init__(self, grammar_of: Callable[[Constraint], str], special: Mapping[str, int]) -> None:
        self._grammar_of, self._special = grammar_of, special
        # The first one is that of the message, and refers to the others by name.
        self.grammars: list[dict[str, Any]] = [{"name": "message", "lark_grammar": ""}]

    def literal(self, text: str) -> str:
        tokens = "|".join(map(re.escape, sorted([*self._special, ID], key=len, reverse=True)))
        return " ".join(
            f"<[{self._special[part]}]>"
            if part in self._special
            else f"/[a-zA-Z0-9]{{{NUM_ID_CHARACTERS}}}/"
            if part == ID
            else json.dumps(part, ensure_ascii=False)
            for part in re.split(f"({tokens})", text)
            if part
        )

    def up_to(self, name: str, tag: str) -> str:
        """A rule for free text that ends with the first `tag`."""
        is_token = tag in self._special
        return f"{name}: ANY {self.literal(tag)}" if is_token else f"{name}[lazy]: ANY {self.literal(tag)}"

    def other(self, name: str, constraint: Constraint) -> str:
        """A reference to another grammar."""
        text = self._grammar_of(constraint)
        grammar = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        self.grammars.append({**grammar, "name": name})
        return f"@{name}"

    def arguments(self, message: MessageConstraint) -> list[tuple[str, str]]:
        """The names of tools that may be called, and a reference to the grammar of each one's arguments."""
        return [
            (name, self.other(f"tool_{i}", Constraint(json_schema=schema, strict=True)))
            for i, name, schema in message.callable_tools
        ]


def _of_tags(message: MessageConstraint, parts: _Parts) -> list[str]:
    answer = parts.other("answer", message.answer) if message.answer else "FREE"
    rules, free = [f"ANY: {ANY}"], ANY
    forms = [] if message.must_call else [answer]
    literal = parts.literal
    if message.calls:
        calls = message.calls
        names = [f"{literal(name + calls.middle)} {arguments}" for name, arguments in parts.arguments(message)]
        rules.append(f"call: {' | '.join(names)}")
        more = calls.between if message.may_repeat else None
        # A lexeme is as long as it can be, so the text that may be the last must be one of its own where another call
        # begins with it: models end their turn after white space, too.
        shared = calls.end if more and more.startswith(calls.end) else ""
        repeated = f"({literal(more.removeprefix(shared))} call {literal(shared)})*" if more else ""
        calls_rule = f"call {literal(shared)} {repeated} {literal(calls.end.removeprefix(shared))} {SPACE}?"
        if message.must_call or not calls.tag or message.answer:
            forms.append(f"{literal(calls.begin)} {calls_rule}")
        else:
            rules.append(parts.up_to("to_calls", calls.tag))
            forms.append(f"to_calls {literal(calls.begin.removeprefix(calls.tag))} {calls_rule}")
        if not calls.tag:
            begin = re.escape(calls.begin).replace("/", r"\/")
            free = rf"{ANY} & ~/\s*{begin}(.|\n)*/"
    rules.append(f"FREE: {free}")
    thought = ""
    if message.thinking:
        begin, end = message.thinking
        rules.append(parts.up_to("thought", end))
        # Models set their answer apart by an empty line.
        gap = "" if answer == "FREE" and not message.must_call else r"/\n{0,2}/"
        thought = f"thought {gap}" if message.in_thought else f"({literal(begin)} thought {gap})?"
    return [f"start: {thought} ({' | '.join(forms)})", *rules]


def _of_channels(message: MessageConstraint, parts: _Parts) -> list[str]:
    """Reasoning, and remarks where the text is free, then a text or one call. A header has the call's name where models
    write it, or where templates do."""
    literal = parts.literal
    answer = parts.other("answer", message.answer) if message.answer else "ANY"
    rules = [f"ANY: {ANY}", parts.up_to("body", END), f"next: {literal(START + ROLE)}"]
    before = [literal(CHANNEL + REASONING + MESSAGE)]
    forms = (
        [] if message.must_call else [answer if message.in_text else literal(CHANNEL + FINAL + MESSAGE) + " " + answer]
    )
    if message.tools:
        if message.answer is None:
            before.append(literal(CHANNEL + REMARK + MESSAGE))
        called = RECIPIENT + FUNCTIONS
        names = parts.arguments(message)
        rules += [f"arguments_{at}: kind? {literal(MESSAGE)} {own}" for at, (_, own) in enumerate(names)]
        rules.append(f'kind: " "? {literal(CONSTRAIN + "json")} | " json"')
        in_channel = [f"{literal(name)} arguments_{at}" for at, (name, _) in enumerate(names)]
        in_role = [f"{literal(name + CHANNEL + REMARK)} arguments_{at}" for at, (name, _) in enumerate(names)]
        rules.append(
            f"call: {literal(f'{CHANNEL}{REMARK} {called}')} ({' | '.join(in_channel)})"
            f" | {literal(f' {called}')} ({' | '.join(in_role)})"
        )
        forms.append("body next before* call" if message.in_text else "call")
    rules.append(f"before: ({' | '.join(before)}) body next")
    return [f"start: {'' if message.in_text else 'before*'} ({' | '.join(forms)})", *rules]
