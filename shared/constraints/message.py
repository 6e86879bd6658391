"""The grammar of a chat's answer: reasoning, text, and calls of tools.

Text is free up to the tag that begins calls: a token that no other text has, or a lazy lexeme of the library, which
takes the tag as soon as it is there.
"""

import json
import re
from collections.abc import Callable, Mapping

from shared.chat.formats import ID, NUM_ID_CHARACTERS
from shared.constraints.constraint import Constraint, MessageConstraint

ANY = r"/(.|\n)*/"
# What may stand between the last call and the end. It is bounded: some models would go on with white space for ever.
SPACE = r"/[ \r\n]{1,4}/"


def message_grammar(
    message: MessageConstraint, grammar_of: Callable[[Constraint], str], special: Mapping[str, int]
) -> str:
    """In the library's own format, with a grammar of its own for each schema. `special`: tokens that are no text."""

    def literal(text: str) -> str:
        tokens = "|".join(map(re.escape, sorted([*special, ID], key=len, reverse=True)))
        return " ".join(
            f"<[{special[part]}]>"
            if part in special
            else f"/[a-zA-Z0-9]{{{NUM_ID_CHARACTERS}}}/"
            if part == ID
            else json.dumps(part, ensure_ascii=False)
            for part in re.split(f"({tokens})", text)
            if part
        )

    def up_to(name: str, tag: str) -> str:
        """A rule for free text that ends with the first `tag`."""
        return f"{name}: ANY {literal(tag)}" if tag in special else f"{name}[lazy]: ANY {literal(tag)}"

    grammars = [{"name": "message", "lark_grammar": ""}]

    def other(name: str, constraint: Constraint) -> str:
        """A reference to another grammar."""
        text = grammar_of(constraint)
        grammar = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        grammars.append({**grammar, "name": name})
        return f"@{name}"

    answer = other("answer", message.answer) if message.answer else "FREE"
    rules, free = [f"ANY: {ANY}"], ANY
    forms = [] if message.must_call else [answer]
    if message.calls:
        calls, names = message.calls, []
        for i, name, schema in message.callable_tools:
            arguments = other(f"tool_{i}", Constraint(json_schema=schema, strict=True))
            names.append(f"{literal(name + calls.middle)} {arguments}")
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
            rules.append(up_to("to_calls", calls.tag))
            forms.append(f"to_calls {literal(calls.begin.removeprefix(calls.tag))} {calls_rule}")
        if not calls.tag:
            begin = re.escape(calls.begin).replace("/", r"\/")
            free = rf"{ANY} & ~/\s*{begin}(.|\n)*/"
    rules.append(f"FREE: {free}")
    thought = ""
    if message.thinking:
        begin, end = message.thinking
        rules.append(up_to("thought", end))
        # Models set their answer apart by an empty line.
        gap = "" if answer == "FREE" and not message.must_call else r"/\n{0,2}/"
        thought = f"thought {gap}" if message.in_thought else f"({literal(begin)} thought {gap})?"
    lark = "\n".join([f"start: {thought} ({' | '.join(forms)})", *rules])
    grammars[0]["lark_grammar"] = lark
    return json.dumps({"grammars": grammars})
