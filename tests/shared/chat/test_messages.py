"""What a template writes of a message is what the format says, what the parser reads, and what the grammar allows."""

import json

import pytest

from shared.chat import formats
from shared.chat.parser import MessageParser
from shared.chat.template import Chat, render
from shared.constraints.compiler import ConstraintCompiler
from shared.constraints.constraint import Constraint, MessageConstraint
from shared.engine.request.prompt import encode_prompt
from shared.errors import InvalidInput
from tests.chats import MARKUP, TEMPLATES, build_chat_model
from tests.tiers import tiered
from tests.worker import CHAT_TEMPLATE

CALLS = [
    ("weather", {"city": 'Z"ü}{rich\\', "days": [1, {"a": "]"}]}),
    ("stop_it", {}),
    ("weather", {"city": "", "days": []}),
]
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "object"}]}},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "stop_it": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.fixture(scope="module", params=[False, True], ids=["text", "tokens"])
def models(request):
    return {name: build_chat_model(template, own_tokens=request.param) for name, template in TEMPLATES.items()}


def written(loaded, text, calls):
    """The assistant's turn, as the template has it in a conversation that goes on."""
    tokenizer, known = loaded.tokenizer, formats.call_format(loaded)
    said = [
        {
            "id": f"abcdefgh{i}",
            "function": {"name": name, "arguments": json.dumps(own, ensure_ascii=False) if known.takes_text else own},
        }
        for i, (name, own) in enumerate(calls)
    ]
    question = [{"role": "user", "content": "Q"}]
    answer = {"role": "assistant", "content": text, "tool_calls": said}
    later = [{"role": "tool", "content": "r"}, {"role": "assistant", "content": "x"}, *question]
    whole = tokenizer.apply_chat_template([*question, answer, *later], tools=[{}], tokenize=False)
    _, _, rest = whole.partition(known.begin)
    return text + known.begin + rest.partition("<eos>")[0]


def read(parser, pieces):
    parts = [parser.push([piece]) for piece in pieces[:-1]] + [parser.finish(pieces[-1])]
    calls = {}
    for call in (call for part in parts for call in part.calls):
        if call.id:
            assert len(call.id) == formats.NUM_ID_CHARACTERS
            assert call.id.isalnum()
            assert call.index == len(calls)
            calls[call.index] = [call.name, ""]
        calls[call.index][1] += call.arguments
    found = [(name, json.loads(own)) for name, own in calls.values()]
    return "".join(p.reasoning for p in parts), "".join(p.text for p in parts), found


@pytest.mark.parametrize("name", tiered(TEMPLATES, {"hermes", "in thought"}))
def test_calls_are_read_as_the_template_writes_them_however_they_are_cut(models, name):
    loaded = models[name]
    known = formats.call_format(loaded)
    tags = ("<think>", "</think>")
    for text in ["", "Let me <see> [\n"][: 1 + bool(known.tag and name != "mistral")]:
        for calls in (CALLS[:1], CALLS):
            if known.between is None and len(calls) > 1:
                continue
            said = written(loaded, text, calls)
            for thought in ("", " <tool_call> \n[TOOL_CALLS] [ Hm. "):
                whole = f"\n<think>{thought}</think>\n\n{said}" if thought else said
                cuts = [[whole], list(whole), ["", whole]]
                cuts += [[whole[:i], whole[i:]] for i in range(len(whole))]
                for pieces in cuts:
                    found = read(MessageParser(tags, calls=known), pieces)
                    assert found == (thought.strip(), text.rstrip(), calls)


@pytest.mark.parametrize("in_thought", [True, False])
def test_the_tokens_of_reasoning_are_counted_with_its_tags(in_thought):
    thought = "Hm. </think>" if in_thought else "<think>Hm. </think>"
    for end in ("", "so", "so <think>x</think>"):
        parser = MessageParser(("<think>", "</think>"), in_thought=in_thought)
        for char in thought + end:
            parser.push([char])
        parser.finish("")
        assert parser.num_reasoning_tokens == len(thought)
    without = MessageParser(("<think>", "</think>"))
    without.push(["s", "o"])
    assert without.num_reasoning_tokens == 0


BARE = '{"name": "go", "arguments": {"a": "}```"}}'
FENCED = f"```json\n{BARE}\n```"
ONE = [("go", {"a": "}```"})]


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (FENCED, "", ONE),
        (f"```\n{BARE}", "", ONE),
        (f"\n {BARE} \n", "", ONE),
        (f"Sure:\n\n{FENCED}\nDone.", "Sure:\nDone.", ONE),
        (f"{BARE}\n{FENCED}\n<tool_call>\n{BARE}\n</tool_call>\n", "", 3 * ONE),
        (f"so <tool_call>\n{BARE}\n</tool_call>", "so", ONE),
        ('{ "name":"mcp.go:all" ,"parameters" :{}}', "", [("mcp.go:all", {})]),
        # No call of one of the tools, or no whole one.
        *((text, text, []) for text in (BARE[:-1], BARE[:-3], f"{BARE[:-1]}, 1}}", BARE.replace("go", "gone"))),
        *((text, text, []) for text in ('{"name": "go", "arguments": {"a": 1,}}', "```py\n{'name'}\n``` `{")),
    ],
)  # fmt: skip
def test_calls_without_the_tag_are_read_if_they_name_a_tool_and_are_whole(text, shown, calls):
    known = formats.call_format(build_chat_model(TEMPLATES["hermes"]))
    for size in (1, 2, 7, len(text)):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        parser = MessageParser(calls=known, bare_tools=["go", "mcp.go:all"])
        assert read(parser, [*pieces, ""]) == ("", shown, calls)
    once = MessageParser(calls=known, bare_tools=["go"], may_repeat=False)
    assert read(once, [BARE, BARE, ""]) == ("", BARE, ONE)


def test_an_answer_that_follows_a_grammar_may_have_the_tag_in_its_text():
    known = formats.call_format(build_chat_model(TEMPLATES["hermes"]))
    call = f"{known.begin}go{known.middle}{{}}{known.end}"
    for text, shown, calls in (
        ('{"a": "<tool_call> is a tag"}', '{"a": "<tool_call> is a tag"}', []),
        (call, "", [("go", {})]),
        (known.begin[:-3], "", []),
    ):
        for pieces in ([text, ""], [*text, ""]):
            assert read(MessageParser(calls=known, has_grammar=True), pieces) == ("", shown, calls)


def test_white_space_is_not_held_back_without_end():
    known = formats.call_format(build_chat_model(TEMPLATES["hermes"]))
    for parser, first in (
        (MessageParser(("<think>", "</think>"), in_thought=True), "x"),
        (MessageParser(("<think>", "</think>"), calls=known), ""),
        (MessageParser(calls=known, has_grammar=True), ""),
        (MessageParser(calls=known, bare_tools=["go"]), ""),
    ):
        parser.push([first])
        parts = [parser.push([" "]) for _ in range(1000)]
        assert sum(len(part.text + part.reasoning) for part in parts) > 900
    for text in (f"{' ' * 100}<tool_call>", f"x{' ' * 100}<tool_call>", f"x{' ' * 100}{BARE}", f"{' ' * 100}<think>"):
        options = {"thinking": ("<think>", "</think>"), "calls": known, "bare_tools": ["go"]}
        assert read(MessageParser(**options), [*text, ""]) == read(MessageParser(**options), [text, ""])


def test_text_without_calls_is_left_as_it_is():
    known = formats.call_format(build_chat_model(TEMPLATES["hermes"]))
    for text in ("", " a <tool_cal ", "\n\n", "<tool>\n <thin", "a <think>b</think>"):
        for calls in (None, known):
            for thinking in (None, ("<think>", "</think>")):
                found = read(MessageParser(thinking, calls=calls), [*text, ""])
                assert found == ("", text, [])
    cut = MessageParser(("<think>", "</think>"), in_thought=True)
    assert read(cut, list(" some <th")) == ("some <th", "", [])


@pytest.mark.parametrize("name", tiered(TEMPLATES, {"hermes"}))
def test_the_grammar_allows_what_the_template_writes_and_holds_arguments(models, name):
    loaded = models[name]
    known, tags = formats.call_format(loaded), formats.thinking_tags(loaded)
    tools = tuple((own, json.dumps(schema)) for own, schema in SCHEMAS.items())
    compiler = ConstraintCompiler(loaded)

    def accepts(text, **fields):
        """Whether the grammar allows the text and its end."""
        state = compiler.start(MessageConstraint(thinking=tags, calls=known, tools=tools, **fields))
        ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        for token in ids:
            allowed = state.allowed().tolist()
            assert [state.allows((), other) for other in range(len(allowed))] == allowed
            if not allowed[token]:
                return False
            state.push(token)
        return all(state.allowed()[token] for token in loaded.eos_token_ids)

    one, two = written(loaded, "", CALLS[1:2]), known.between and written(loaded, "", CALLS)
    bad = one.replace("{}", '{"x": 1}')
    assert one != bad
    answer = Constraint(choice=("yes", "no"))
    for must_call in (False, True):
        assert accepts(one, must_call=must_call)
        assert not accepts(one[:-1], must_call=must_call)
        assert accepts(one + "\n", must_call=must_call)
        assert not accepts(one + 5 * "\n", must_call=must_call)
        assert not accepts(bad, must_call=must_call)
        assert not accepts(one.replace("stop_it", "stop_all"), must_call=must_call)
        assert accepts("Some <text> {", must_call=must_call) != must_call
        if two:
            assert accepts(two, must_call=must_call)
            assert accepts(two + " \n", must_call=must_call)
            assert not accepts(two, must_call=must_call, may_repeat=False)
        if tags:
            thought = f"<think>\nhm {known.begin}\n</think>\n\n" if known.tag else "<think>hm</think>"
            thought = thought.replace(known.tag, "") if known.tag else thought
            assert accepts(thought + one, must_call=must_call)
            assert accepts(thought.removeprefix("<think>") + one, must_call=must_call, in_thought=True)
            assert not accepts(one, must_call=must_call, in_thought=True)
    if known.tag:
        assert accepts("Some\ntext. " + one)
        assert not accepts("Some\ntext. " + bad)
        assert accepts("yes", answer=answer)
        assert accepts(one, answer=answer)
        assert not accepts("maybe", answer=answer)


@pytest.mark.parametrize("template", [MARKUP, CHAT_TEMPLATE, ""])
def test_a_template_without_readable_tools_is_no_format(template):
    with pytest.raises(InvalidInput) as caught:
        formats.call_format(build_chat_model(template))
    reason = "TOOLS_NOT_SUPPORTED" if template else "NO_CHAT_TEMPLATE"
    assert caught.value.reason == reason


def test_arguments_of_the_template_reach_it_and_its_own_are_kept_from_clients():
    loaded = build_chat_model(TEMPLATES["thinking"])
    messages = [{"role": "user", "content": "x"}]

    def prompt(**arguments):
        return render(loaded.tokenizer, Chat(messages, arguments=arguments))

    assert prompt(enable_thinking=False) == prompt() + "<think>\n\n</think>\n\n"
    for name in ("tools", "messages", "add_generation_prompt", "chat_template", "eos_token"):
        with pytest.raises(InvalidInput, match=name):
            prompt(**{name: "x"})


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", ": roles must alternate"),
        ("{{ messages.x.y }}", ""),
        ("{%", ""),
    ],
)
def test_a_template_that_refuses_is_quoted_and_its_faults_are_not(template, said):
    with pytest.raises(InvalidInput) as caught:
        render(build_chat_model(template).tokenizer, Chat([{"role": "user", "content": "x"}]))
    assert caught.value.reason == "CHAT_TEMPLATE_REFUSED"
    assert caught.value.message == f"the model's chat template refuses these messages{said}"


def test_values_that_are_nested_without_end_are_refused():
    nested = {}
    for _ in range(5000):
        nested = {"a": nested}
    with pytest.raises(InvalidInput, match="nested too deeply"):
        encode_prompt(build_chat_model(TEMPLATES["thinking"]), Chat([{"role": "user", "content": "x"}], (), nested))
