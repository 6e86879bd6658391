"""Tools and reasoning through the gateway, as the `openai` package and LangChain see them."""

import json
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.chat_gateways import chat_gateway
from tests.chats import HERMES, IN_THOUGHT
from tests.gateways import chat_body
from tests.worker import EOS, build_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["thin", "é😀"]},
        "sizes": {"type": "array", "items": {"enum": [1, 12]}, "maxItems": 2},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "make", "description": "d", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "stop", "strict": True}}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [TOOL, OTHER],
    "temperature": 0,
    "max_tokens": 300,
}
NAMED = {"type": "function", "function": {"name": "make"}}


@pytest.fixture(scope="module", params=[HERMES, IN_THOUGHT], ids=["plain", "thinking"])
def state(request, tmp_path_factory):
    with chat_gateway(request.param, tmp_path_factory.mktemp("registry")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(state):
    with openai.OpenAI(base_url=f"{state.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("choice", ["required", "auto", NAMED], ids=["required", "auto", "named"])
def test_calls_are_whole_in_an_answer_and_in_pieces_in_a_stream(state, client, choice):
    asked = {**CHAT, "tool_choice": choice, "logit_bias": state.bias, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    [call] = answer.message.tool_calls
    assert (call.type, call.function.name in ("make", "stop")) == ("function", True)
    assert call.function.name == "make" or choice != NAMED
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMA if call.function.name == "make" else {"maxProperties": 0})

    pieces, reasons = [], []
    for chunk in client.chat.completions.create(**asked, stream=True):
        assert not chunk.choices[0].delta.content
        reasons.append(chunk.choices[0].finish_reason)
        # Instructor looks at the first one alone.
        assert len(chunk.choices[0].delta.tool_calls or []) <= 1
        pieces += chunk.choices[0].delta.tool_calls or []
    assert reasons[-1] == "tool_calls"
    first, *rest = pieces
    assert (first.function.name, first.type) == (call.function.name, "function")
    assert first.id
    assert {(piece.index, piece.id, piece.function.name) for piece in rest} <= {(0, None, None)}
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    with client.chat.completions.stream(**asked) as stream:  # the package's own way to put them together
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == call.function.arguments


def test_several_calls_are_told_apart_by_their_index(state, client):
    # A line break, and then the next call.
    again = {str(build_tokenizer().convert_tokens_to_ids("Ċ")): 50, str(EOS): -100}
    asked = {**CHAT, "tool_choice": "required", "logit_bias": {**state.bias, **again}}
    answer = client.chat.completions.create(**asked).choices[0]
    calls = answer.message.tool_calls
    assert len(calls) > 2
    assert len({call.id for call in calls}) == len(calls)
    for call in calls[:-1]:  # the last one may be cut off
        jsonschema.validate(
            json.loads(call.function.arguments), SCHEMA if call.function.name == "make" else {"maxProperties": 0}
        )
    streamed = [""] * len(calls)
    for chunk in client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            streamed[piece.index] += piece.function.arguments
    assert streamed == [call.function.arguments for call in calls]


def test_reasoning_is_apart_from_the_text(state, client):
    asked = {**CHAT, "tools": [], "max_tokens": 20, "seed": 4, "temperature": 1.0}
    asked["logit_bias"] = state.bias
    message = client.chat.completions.create(**asked).choices[0].message
    assert "reasoning_content" not in message.model_extra
    del asked["logit_bias"]
    answer = client.chat.completions.create(**asked)
    message, details = answer.choices[0].message, answer.usage.completion_tokens_details
    assert details.reasoning_tokens == (answer.usage.completion_tokens if state.thinks else 0)
    reasoning = message.model_extra.get("reasoning_content", "")
    assert bool(reasoning) == state.thinks
    assert bool(message.content) != state.thinks, "a random model does not end its thoughts"
    usage = {"include_usage": True}
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options=usage)
    assert last.usage.completion_tokens_details == details
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.model_extra.get("reasoning_content", "") for delta in deltas) == reasoning
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_a_conversation_goes_on_with_a_calls_result(state, client):
    asked = {**CHAT, "tool_choice": "required", "logit_bias": state.bias, "parallel_tool_calls": False}
    message = client.chat.completions.create(**asked).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12"}
    messages = [*CHAT["messages"], message.model_dump(), result]
    again = client.chat.completions.create(**{**CHAT, "messages": messages, "max_tokens": 4})
    first = client.chat.completions.create(**{**CHAT, "max_tokens": 4})
    assert again.usage.prompt_tokens > first.usage.prompt_tokens + 40


def test_every_answer_may_be_sent_back_however_it_ended(state, client):
    """With arguments that max_tokens has cut, as an object, or without any; and a result without text."""
    asked = {**CHAT, "tool_choice": "required", "logit_bias": state.bias}
    for cut in range(1, 60, 4):
        message = client.chat.completions.create(**{**asked, "max_tokens": cut}).choices[0].message.model_dump()
        again = [*CHAT["messages"], message, *CHAT["messages"]]
        client.chat.completions.create(**{**CHAT, "messages": again, "max_tokens": 1})
    assert message["tool_calls"]
    call = message["tool_calls"][0]
    for arguments in ({"kind": "thin"}, {}, None, ""):
        call["function"]["arguments"] = arguments
        result = {"role": "tool", "tool_call_id": call["id"], "content": None}
        client.chat.completions.create(**{**CHAT, "messages": [*again[:2], result], "max_tokens": 1})
    del call["function"]["arguments"]
    client.chat.completions.create(**{**CHAT, "messages": again, "max_tokens": 1})


class Thing(BaseModel, extra="forbid"):
    kind: Literal["thin", "é😀"]
    size: int = Field(ge=1, le=9)


class Anything(BaseModel, extra="allow"):
    """What a JSON object can be."""


@pytest.mark.parametrize("strict", [None, True], ids=["loose", "strict"])
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_gets_structured_output_by_every_method(state, method, strict):
    if method == "json_mode" and strict:
        pytest.skip("LangChain itself refuses it")
    from langchain_openai import ChatOpenAI

    # A random model hardly closes strings and objects by itself.
    closing = zip(build_tokenizer().convert_tokens_to_ids(['"', "}"]), (100, 60), strict=True)
    bias = {**state.bias, **{str(token): value for token, value in closing}}
    model = ChatOpenAI(
        model="tiny", base_url=f"{state.url}/v1", api_key="unused", seed=1, max_tokens=400, logit_bias=bias
    )
    kind = Anything if method == "json_mode" else Thing
    given = {} if strict is None else {"strict": strict}
    bound = model.with_structured_output(kind, method=method, include_raw=True, **given)
    found = bound.invoke("hello")
    assert found["parsing_error"] is None
    assert isinstance(found["parsed"], kind)


def test_langchain_binds_tools(state):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=f"{state.url}/v1", api_key="unused", temperature=0, max_tokens=300).bind(
        logit_bias=state.bias, parallel_tool_calls=False
    )
    bound = model.bound.bind_tools([TOOL], tool_choice="make").bind(**model.kwargs)
    answer = bound.invoke([HumanMessage("hello")])
    [call] = answer.tool_calls
    jsonschema.validate(call["args"], SCHEMA)
    result = ToolMessage("12", tool_call_id=call["id"])
    assert bound.invoke([HumanMessage("hello"), answer, result]).tool_calls
    streamed = None
    for chunk in bound.stream([HumanMessage("hello")]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == call["args"]


def test_what_of_a_schema_is_not_enforced_is_named_and_strict_refuses_it(state, client):
    schema = {"type": "object", "properties": {"a": {"not": {}, "format": "path"}}}
    tools = [TOOL, {"type": "function", "function": {"name": "mcp.read", "parameters": schema}}]
    asked = {**CHAT, "tools": tools, "max_tokens": 4, "logit_bias": state.bias}
    [warning] = client.chat.completions.create(**asked).choices[0].model_extra["neap"]["warnings"]
    assert warning == "tools[1].parameters: #/properties/a/not is not enforced"
    tools[1]["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="not"):
        client.chat.completions.create(**asked)
    kind = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    loose, strict = ({**CHAT, "tools": [], "response_format": kind, "max_tokens": 4} for _ in range(2))
    [warning] = client.chat.completions.create(**loose).choices[0].model_extra["neap"]["warnings"]
    assert "#/properties/a/not" in warning
    kind["json_schema"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="not"):
        client.chat.completions.create(**strict)


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        ({"tools": [{"type": "function"}]}, "INVALID_INPUT", "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "INVALID_INPUT", "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "INVALID_INPUT", "tools[1].name"),
        ({"tool_choice": "any"}, "INVALID_INPUT", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "INVALID_INPUT", "tool_choice"),
        ({"tools": [{**TOOL, "function": {"name": "a", "x": {}}}]}, "UNKNOWN_FIELD", "tools[0].function.x"),
        ({"chat_template_kwargs": {"messages": []}}, "INVALID_INPUT", None),
        ({"messages": [{"role": "tool", "content": "x"}]}, "INVALID_INPUT", "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "INVALID_INPUT", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]},
            "INVALID_INPUT",
            "messages[0].tool_call_id",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_by_name(state, fields, reason, param):
    reply = state.http.post("/v1/chat/completions", json=chat_body(**{"tools": [TOOL], **fields}))
    error = reply.json()["error"]
    assert (reply.status_code, error["neap"]["reason"], error["param"]) == (400, reason, param), error
