"""Answers in channels: what models write is read however it is cut, and the grammar allows it and holds arguments."""

import json
import random

import pytest

from shared.chat import formats
from shared.chat.channels import ChannelParser, has_channels
from shared.constraints.compiler import ConstraintCompiler
from shared.constraints.constraint import Constraint, MessageConstraint
from tests.chats import CHANNELS, HERMES, build_chat_model

THOUGHT = "<|channel|>analysis<|message|>Hm. <think> \n<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
REMARK = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.go <|constrain|>json<|message|>"
# As templates write it.
IN_ROLE = " to=functions.go<|channel|>commentary json<|message|>"
ARGUMENTS = '{"a": "<|en"}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
TOOLS = (("go", json.dumps(SCHEMA)), ("go_on", json.dumps(SCHEMA)))


@pytest.fixture(scope="module")
def loaded():
    return build_chat_model(CHANNELS)


def read(parser, pieces):
    """Reasoning, text, and by call its name and arguments."""
    parts = [parser.push([piece]) for piece in pieces] + [parser.finish("")]
    calls = {}
    for call in (call for part in parts for call in part.calls):
        assert bool(call.id) == bool(call.name) == (call.index not in calls)
        calls[call.index] = (call.name or calls[call.index][0], calls.get(call.index, ("", ""))[1] + call.arguments)
    return "".join(part.reasoning for part in parts), "".join(part.text for part in parts), [*calls.values()]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (THOUGHT + FINAL + "So it is.\n", ("Hm. <think> \n", "So it is.\n", [])),
        (FINAL + "So", ("", "So", [])),
        (THOUGHT + THOUGHT + REMARK + FINAL + "So", ("Hm. <think> \n\n\nHm. <think> \n", "I look.\n\nSo", [])),
        *((THOUGHT + call + ARGUMENTS, ("Hm. <think> \n", "", [("go", ARGUMENTS)])) for call in (CALL, IN_ROLE)),
        (REMARK + CALL + "{}<|call|>", ("", "I look.", [("go", "{}")])),
        (CALL.replace("functions.go", "browser.open") + "{}", ("", "", [("browser.open", "{}")])),
        (f"{CALL}{{}}<|call|><|start|>assistant{IN_ROLE}{{}}", ("", "", [("go", "{}"), ("go", "{}")])),
        # What is cut, and what is no such message.
        (THOUGHT[:40], ("Hm. <think>"[: 40 - len("<|channel|>analysis<|message|>")], "", [])),
        (THOUGHT, ("Hm. <think> \n", "", [])),
        *((text, ("", "", [])) for text in ("", "<|channel|>fin", "<|start|>assistant", " to=functions.go")),
        ("A plain text.", ("", "A plain text.", [])),
        ("assistants <|end", ("", "assistants <|end", [])),
        (f"{THOUGHT}So", ("Hm. <think> \n", "So", [])),
        (f"<|channel|>{'x' * 600}", ("", "x" * 600, [])),
        ("<|start|><|start|>assistant so", ("", "so", [])),
        (f"x<|message|>{FINAL}y", ("", "x<|message|>\n\ny", [])),
        ("<|message|>x", ("", "x", [])),
    ],
)
def test_messages_are_told_apart_however_they_are_cut(text, found):
    pieces = [list(text), [text], [text[:9], text[9:]]]
    for _ in range(20):
        at = sorted(random.Random(len(pieces)).sample(range(len(text) + 1), min(4, len(text) + 1)))
        pieces.append([text[begin:end] for begin, end in zip([0, *at], [*at, None], strict=True)])
    for cut in pieces:
        assert read(ChannelParser(has_tools=True), cut) == found


def test_without_tools_a_message_to_another_is_no_text():
    assert read(ChannelParser(), list(THOUGHT + CALL + "{}")) == ("Hm. <think> \n\n\n{}", "", [])


def test_an_answer_may_go_on_within_a_text():
    parser = ChannelParser(has_tools=True, in_text=True)
    assert read(parser, [*"on<|end|><|start|>assistant", *CALL, "{}"]) == ("", "on", [("go", "{}")])


def test_the_tokens_of_reasoning_are_counted_with_their_header():
    for rest in ("", FINAL + "So", CALL + "{}"):
        parser = ChannelParser(has_tools=True)
        for piece in ["<|channel|>", "analysis", "<|message|>", "Hm", ".", "<|end|>", "<|start|>", "assistant", *rest]:
            parser.push([piece])
        parser.finish("")
        assert parser.num_reasoning_tokens == 6


def test_channels_are_known_by_the_template_and_its_tokens(loaded):
    assert has_channels(loaded)
    assert not has_channels(build_chat_model(HERMES))
    without_tokens = build_chat_model(CHANNELS.replace("channels", ""))
    without_tokens.tokenizer.chat_template = HERMES
    assert not has_channels(without_tokens)
    known = formats.call_format(loaded)
    assert (known.begin, known.middle) == ("to=functions.", IN_ROLE.partition("go")[2])


def test_the_grammar_allows_what_models_write_and_holds_arguments_and_answers(loaded):
    compiler = ConstraintCompiler(loaded)

    def accepts(text, **fields):
        """Whether the grammar allows the text and its end."""
        state = compiler.start(MessageConstraint(channels=True, **fields))
        for token in loaded.tokenizer(text, add_special_tokens=False)["input_ids"]:
            if not state.allowed()[token]:
                return False
            state.push(token)
        return all(state.allowed()[token] for token in loaded.eos_token_ids)

    good = [form.replace("go", name) + '{"a": "b"}' for form in (CALL, IN_ROLE) for name in ("go", "go_on")]
    good += [good[0].replace(" <|constrain|>json", kind) for kind in ("", " json", "<|constrain|>json")]
    bad = [good[0].replace('"a"', '"b"'), good[2].replace("go", "gone"), good[0][:-1], good[0] + FINAL + "x"]
    answer = Constraint(choice=("yes", "no"))
    for fields in ({"tools": TOOLS}, {"tools": TOOLS, "must_call": True}, {"tools": TOOLS, "answer": answer}):
        for before in ("", THOUGHT, THOUGHT + THOUGHT):
            assert [accepts(before + call, **fields) for call in good] == [True] * len(good)
            assert not any(accepts(before + call, **fields) for call in bad)
            assert accepts(before + FINAL + "maybe {", **fields) == (fields == {"tools": TOOLS})
        assert accepts(THOUGHT + REMARK + good[0], **fields) == ("answer" not in fields)
        in_text = "x<|end|><|start|>assistant" + THOUGHT + good[0]
        assert accepts(in_text, in_text=True, **fields)
        assert not accepts(good[0], in_text=True, **fields)
    assert accepts("any <|text", tools=TOOLS, in_text=True)
    assert accepts("yes", answer=answer, in_text=True)
    for fields in ({"answer": answer}, {"answer": answer, "tools": TOOLS}):
        for before in ("", THOUGHT):
            assert accepts(before + FINAL + "yes", **fields)
            assert not accepts(before + FINAL + "maybe", **fields)
        assert not accepts("yes", **fields)
        assert not accepts(REMARK + FINAL + "yes", **fields)
    assert not accepts(good[0], answer=answer)
