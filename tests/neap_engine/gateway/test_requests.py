"""What bodies become as calls of workers."""

import json

import pytest
from neap_client.inference.v1 import inference_pb2 as pb

from neap_engine.gateway.requests import json_text, parse_generation
from neap_engine.gateway.schema import ChatRequest, CompletionRequest
from shared.errors import InvalidInput
from tests.gateways import chat_body
from tests.reasons import raises


def call(**fields):
    body = {"model": "tiny", "prompt": "x", **fields} if "messages" not in fields else {"model": "tiny", **fields}
    generation = parse_generation(
        json.dumps(body).encode(), ChatRequest if "messages" in fields else CompletionRequest, max_choices=4
    )
    return pb.GenerateRequest.FromString(generation.calls()[0][0])


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"structured_outputs": {"regex": "a+"}}, pb.Constraint(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, pb.Constraint(choice=pb.Choice(texts=["a", "b"]))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, pb.Constraint(lark='start: "a"')),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            pb.Constraint(json_schema='{"type": "object"}'),
        ),
        ({"structured_outputs": {"json": '{"type":"object"}'}}, pb.Constraint(json_schema='{"type":"object"}')),
        ({"structured_outputs": {"json_object": True}}, pb.Constraint(json_object=pb.JsonObject())),
        ({"structured_outputs": {"regex": "a", "json_object": False}}, pb.Constraint(regex="a")),
        ({"structured_outputs": {"json_object": False, "json": None}}, None),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, pb.Constraint(regex="a")),
        ({"response_format": {"type": "json_object"}}, pb.Constraint(json_object=pb.JsonObject())),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            pb.Constraint(json_schema='{"type": "object"}'),
        ),
    ],
    ids=str,
)
def test_structured_answers_have_the_forms_of_other_servers(fields, constraint):
    sent = call(**fields)
    assert (sent.constraint if sent.HasField("constraint") else None) == constraint
    assert call(**fields, messages=chat_body()["messages"]).constraint == sent.constraint


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_that_the_model_gets(mode):
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tools[2], tools[0]]}}
    chat = call(**chat_body(tools=tools, tool_choice=choice)).chat
    assert [tool.name for tool in chat.tools] == ["a", "c"]
    assert chat.tool_choice.HasField("required") == (mode == "required")


def test_an_answer_may_go_on_with_the_last_message():
    assert call(**chat_body(continue_final_message=True, add_generation_prompt=False)).chat.continues_last_message
    assert call(**chat_body(continue_final_message=True)).chat.continues_last_message
    assert not call(**chat_body(continue_final_message=False, add_generation_prompt=True)).chat.continues_last_message
    for fields in ({"add_generation_prompt": False}, {"continue_final_message": True, "add_generation_prompt": True}):
        with raises(InvalidInput, reason="UNSUPPORTED_FIELD", match="add_generation_prompt"):
            call(**chat_body(**fields))
    with raises(InvalidInput, reason="UNSUPPORTED_FIELD", match="continue_final_message"):
        call(continue_final_message=True)


def test_what_clients_send_back_of_messages_has_no_effect():
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    called = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    messages = [
        {"role": "user", "content": [part], "cache_control": {"type": "ephemeral"}},
        {
            "role": "assistant", "content": None, "provider_specific_fields": {"a": 1}, "audio": None,
            "reasoning": "so", "annotations": [{"type": "url_citation"}],
            "tool_calls": [{"id": "1", "type": "function", "function": called, "caller": {}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "y", "status": "success"},
    ]  # fmt: skip
    sent = call(messages=messages).chat.messages
    assert [(message.content, message.reasoning) for message in sent] == [("x", ""), ("", "so"), ("y", "")]
    assert sent[1].tool_calls == [pb.ToolCall(id="1", name="f", arguments="{}")]


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"temperature": 1e-7}, pb.Sampling(temperature=0)),
        ({"temperature": 1e-6}, pb.Sampling(temperature=1e-6)),
        ({"top_p": 0}, pb.Sampling(temperature=0)),
        ({"temperature": 1e-7, "top_p": 0.5}, pb.Sampling(temperature=0, top_p=0.5)),
        ({}, pb.Sampling()),
    ],
    ids=str,
)
def test_where_only_the_most_probable_token_is_left_sampling_is_greedy(fields, sampling):
    assert call(**fields).sampling == sampling


def test_a_value_that_can_be_read_and_not_be_written_again_is_bad_json():
    """Both nest calls, and the one that writes has less room left."""
    value = []
    for _ in range(100_000):
        value = [value]
    with raises(InvalidInput, "BAD_JSON"):
        json_text(value)


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, ""),
        ({"reasoning_effort": None}, ""),
        *(
            ({"reasoning_effort": effort}, {"reasoning_effort": effort})
            for effort in ("low", "medium", "high", "other")
        ),
        *(({"reasoning_effort": effort}, {"reasoning_effort": "low"}) for effort in ("none", "minimal")),
        ({"reasoning_effort": "xhigh"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}, {"reasoning_effort": "low", "x": 1}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "a"}}, {"reasoning_effort": "a"}),
    ],
)
def test_the_template_is_told_how_much_to_think(fields, arguments):
    told = call(**chat_body(**fields)).chat.template_arguments
    assert (json.loads(told) if told else told) == arguments
