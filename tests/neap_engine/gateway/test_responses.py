"""/v1/responses: the chat that a body is, and what its answer becomes, as the `openai` package sees it."""

import asyncio
import json
import threading
from typing import Literal

import openai
import pytest
from neap_client.inference.v1 import inference_pb2 as pb
from pydantic import BaseModel, Field

from neap_engine.gateway import exchange
from neap_engine.gateway.requests import parse_generation
from neap_engine.gateway.responses_schema import ResponsesRequest
from neap_engine.gateway.schema import ChatRequest
from shared.errors import Unavailable
from tests.chat_gateways import chat_gateway
from tests.chats import HERMES, IN_THOUGHT
from tests.gateways import chunk, finished, gateway_to, scripted_worker, started
from tests.tiers import tiered
from tests.worker import EOS, build_tokenizer

PATH = "/v1/responses"
ASKED = {"model": "tiny", "input": "hello", "temperature": 0}
USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 12]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "name": "make", "description": "d", "parameters": SCHEMA, "strict": True}
CHAT_TOOL = {
    "type": "function",
    "function": {name: TOOL[name] for name in ("name", "description", "parameters", "strict")},
}
CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "make",
    "arguments": '{"a": 1}',
    "id": "fc_1",
    "status": "completed",
}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "make", "arguments": '{"a": 1}'}}
NAMED = {"type": "function", "name": "make"}
SAID = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}


def thought(*texts, kind="content"):
    part = {"content": "reasoning_text", "summary": "summary_text"}[kind]
    return {"type": "reasoning", "id": "r", "summary": [], kind: [{"type": part, "text": text} for text in texts]}


def said(*texts):
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
    return {**SAID, "content": content}


def result(call_id, output):
    return {"type": "function_call_output", "call_id": call_id, "output": output}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({}, {}),
        ({"instructions": "i"}, {"messages": [{"role": "system", "content": "i"}, USER]}),
        ({"input": [{**USER, "type": "message"}]}, {}),
        (
            {"input": [{"role": "developer", "content": [{"type": "input_text", "text": part} for part in "ab"]}]},
            {"messages": [{"role": "developer", "content": "a\nb"}]},
        ),
        (
            {"input": [USER, thought("t", "u"), said("a", "b"), CALL, {**CALL, "call_id": "c2"}, result("c1", "1")]},
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "reasoning_content": "t\nu",
                        "content": "a\nb",
                        "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "1"},
                ]
            },
        ),
        (
            {"input": [said("a"), said("b"), CALL, thought("t", kind="summary"), CALL, USER]},
            {
                "messages": [
                    {"role": "assistant", "content": "a"},
                    {"role": "assistant", "content": "b", "tool_calls": [CHAT_CALL]},
                    {"role": "assistant", "reasoning_content": "t", "tool_calls": [CHAT_CALL]},
                    USER,
                ]
            },
        ),
        (
            {"input": [CALL, result("c1", [{"type": "input_text", "text": "x"}])]},
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [CHAT_CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "x"},
                ]
            },
        ),
        ({"max_output_tokens": 5}, {"max_completion_tokens": 5}),
        ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [CHAT_TOOL], "tool_choice": "required"}),
        (
            {"tools": [TOOL], "tool_choice": NAMED, "parallel_tool_calls": False},
            {
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "make"}},
                "parallel_tool_calls": False,
            },
        ),
        (
            {
                "tools": [TOOL, {**TOOL, "name": "b"}],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
            },
            {"tools": [CHAT_TOOL]},
        ),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        (
            {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2},
            {"logprobs": True, "top_logprobs": 2},
        ),
        (
            {"store": True, "background": False, "truncation": "disabled", "reasoning": {"effort": "low"}},
            {"reasoning_effort": "low"},
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        *(
            ({name: value}, {name: value})
            for name, value in {
                "seed": 3,
                "stop": ["x"],
                "top_k": 4,
                "top_p": 0.5,
                "min_p": 0.1,
                "logit_bias": {"5": 1},
                "structured_outputs": {"regex": "a"},
                "prediction": {"type": "content", "content": "x"},
                "neap": {"policy": "relaxed", "margin": 1, "router_version": 2, "priority": 3, "learn": "never"},
            }.items()
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_response_is_the_call_of_a_chat(fields, chat):
    def calls(kind, body):
        generation = parse_generation(json.dumps({"model": "m", **body}).encode(), kind, max_choices=1)
        return [pb.GenerateRequest.FromString(call) for call, _ in generation.calls()]

    assert calls(ResponsesRequest, {"input": "hello", **fields}) == calls(ChatRequest, {"messages": [USER], **chat})


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        ({"previous_response_id": "resp_1"}, "UNSUPPORTED_FIELD", "previous_response_id"),
        ({"conversation": "conv_1"}, "UNSUPPORTED_FIELD", "conversation"),
        ({"conversation": {"id": "conv_1"}}, "UNSUPPORTED_FIELD", "conversation"),
        ({"background": True}, "UNSUPPORTED_FIELD", "background"),
        ({"prompt": {"id": "pmpt_1"}}, "UNSUPPORTED_FIELD", "prompt"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "UNSUPPORTED_FIELD", "input[0].id"),
        ({"store": 1}, "UNSUPPORTED_FIELD", "store"),
        ({"truncation": "auto"}, "UNSUPPORTED_FIELD", "truncation"),
        ({"context_management": [{"type": "compaction"}]}, "UNSUPPORTED_FIELD", "context_management"),
        ({"max_tokens": 5}, "UNKNOWN_FIELD", "max_tokens"),
        ({"messages": []}, "UNKNOWN_FIELD", "messages"),
        ({"text": {"fromat": {}}}, "UNKNOWN_FIELD", "text.fromat"),
        ({"tools": [{**TOOL, "desc": "x"}]}, "UNKNOWN_FIELD", "tools[0].desc"),
        ({"input": []}, "INVALID_INPUT", "input"),
        ({"input": [1]}, "INVALID_INPUT", "input[0]"),
        ({"input": [USER, {"type": "web_search_call", "id": "w"}]}, "INVALID_INPUT", "input[1]"),
        ({"input": [{"type": ["message"]}]}, "INVALID_INPUT", "input[0]"),
        ({"input": [{"role": "poet", "content": "x"}]}, "INVALID_INPUT", "input[0].role"),
        ({"input": [{"role": "user"}]}, "INVALID_INPUT", "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "INVALID_INPUT",
            "input[0].content[0].type",
        ),
        ({"input": [{**CALL, "arguments": 1}]}, "INVALID_INPUT", "input[0].arguments"),
        ({"input": [{**CALL, "call_id": None}]}, "INVALID_INPUT", "input[0].call_id"),
        ({"input": [result(None, "x")]}, "INVALID_INPUT", "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "INVALID_INPUT", "tools[0].type"),
        ({"tools": [CHAT_TOOL]}, "INVALID_INPUT", "tools[0].name"),
        ({"tool_choice": {"type": "function"}}, "INVALID_INPUT", "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "INVALID_INPUT", "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "INVALID_INPUT", "text.format.schema"),
        ({"top_logprobs": 2}, "INVALID_INPUT", "top_logprobs"),
        ({"max_output_tokens": 0}, "INVALID_INPUT", "max_output_tokens"),
        ({"include": "x"}, "INVALID_INPUT", "include"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_by_name(scripted, fields, reason, param):
    worker, gateway = scripted
    before = len(worker.requests)
    reply = gateway.http.post(PATH, json={**ASKED, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["neap"]["reason"]) == (400, reason), error
    assert error["param"].startswith(param)
    if param in ("previous_response_id", "conversation", "background", "prompt", "input[0].id"):
        assert "nothing is stored" in error["message"]
    assert len(worker.requests) == before


WRONG = (None, True, -1, 1.5, 10**30, "", "x", [], [None], ["x"], [[]], [{}], {}, {"x": 1}, {"type": "message"})


@pytest.mark.parametrize(
    "name",
    tiered(
        [*ResponsesRequest.model_fields, *ResponsesRequest.unsupported],
        {"model", "input", "stream", "tools", "text", "max_output_tokens", *list(ResponsesRequest.unsupported)[:1]},
    ),
)
def test_a_field_of_any_type_is_served_or_refused(scripted, name):
    _, gateway = scripted
    for value in WRONG:
        if (name, value) == ("stream", True):
            continue
        reply = gateway.http.post(PATH, json={**ASKED, name: value})
        error = reply.json()["error"]
        assert reply.status_code in (200, 400), (value, reply.text)
        assert error is None or error["neap"]["reason"] in ("INVALID_INPUT", "UNKNOWN_FIELD", "UNSUPPORTED_FIELD")
        assert value is not None or name in ("model", "input") or reply.status_code == 200
        assert error is None or error["param"].startswith(name)


@pytest.fixture(scope="module", params=[HERMES, IN_THOUGHT], ids=["plain", "thinking"])
def state(request, tmp_path_factory):
    with chat_gateway(request.param, tmp_path_factory.mktemp("registry")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def openai_client(state):
    with openai.OpenAI(base_url=f"{state.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def told(items):
    """What items say, without their ids."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in items]


def streamed(client, **asked):
    """The response at a stream's end, with the events checked against it."""
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    last = events[-1].response
    assert kinds[-1] == f"response.{last.status}"
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert {event.response.id for event in (events[0], events[1], events[-1])} == {last.id}
    pieces = [""] * len(last.output)
    for event in events:
        if event.type.endswith(".delta"):
            assert event.item_id == last.output[event.output_index].id
            pieces[event.output_index] += event.delta
    for place, item in enumerate(last.output):
        [done] = [e.item for e in events if e.type == "response.output_item.done" and e.output_index == place]
        assert done == item
        whole = item.arguments if item.type == "function_call" else item.content[0].text
        assert pieces[place] == whole
    # One item after the other.
    items = [(e.type, e.output_index) for e in events if e.type.startswith("response.output_item.")]
    both = [f"response.output_item.{what}" for what in ("added", "done")]
    assert items == [(what, place) for place in range(len(last.output)) for what in both]
    return last


def test_a_text_is_that_of_the_chat_whole_and_in_a_stream(state, openai_client):
    fields = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
    chat = openai_client.chat.completions.create(**fields, messages=[USER], max_tokens=12)
    asked = {**fields, "input": "hello", "max_output_tokens": 12, "metadata": {"a": "b"}, "instructions": ""}
    answer = openai_client.responses.create(**asked)
    [item] = answer.output
    message = chat.choices[0].message
    text = message.model_extra["reasoning_content"] if state.thinks else message.content
    assert (item.type, item.content[0].text) == ("reasoning" if state.thinks else "message", text)
    assert answer.output_text == message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    assert answer.usage.output_tokens_details.reasoning_tokens == (12 if state.thinks else 0)
    assert (answer.metadata, answer.instructions, answer.model_extra["store"]) == ({"a": "b"}, "", False)
    neap, of_chat = answer.model_extra["neap"], chat.choices[0].model_extra["neap"]
    assert neap.keys() == of_chat.keys()
    assert (neap["numerics_id"], neap["router_version"]) == (of_chat["numerics_id"], 1)
    last = streamed(openai_client, **asked)
    assert (told(last.output), last.usage.output_tokens) == (told(answer.output), 12)


def test_calls_go_out_and_their_results_come_back(state, openai_client):
    # A line break, and then the next call.
    again = {str(build_tokenizer().convert_tokens_to_ids("Ċ")): 50, str(EOS): -100}
    asked = {**ASKED, "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 120}
    asked["extra_body"] = {"logit_bias": {**state.bias, **again}}
    answer = openai_client.responses.create(**asked)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert len(calls) > 2
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == len(calls)
    assert {(call.name, call.status, json.loads(call.arguments)["a"] in (1, 12)) for call in calls[:-1]} == {
        ("make", "completed", True)
    }
    assert calls[-1].status == "incomplete"
    last = streamed(openai_client, **asked)
    assert told(last.output) == told(answer.output)
    results = [result(call.call_id, "1") for call in calls]
    items = [USER, *(item.model_dump() for item in answer.output), *results]
    following = openai_client.responses.create(**{**asked, "input": items, "max_output_tokens": 4})
    assert following.usage.input_tokens > answer.usage.input_tokens + 20 * len(calls)


class Thing(BaseModel, extra="forbid"):
    kind: Literal["thin", "é😀"]
    size: int = Field(ge=1, le=9)


def test_structured_output_is_parsed(state, openai_client):
    # A random model hardly closes strings and objects by itself.
    closing = zip(build_tokenizer().convert_tokens_to_ids(['"', "}"]), (100, 60), strict=True)
    bias = {**state.bias, **{str(token): value for token, value in closing}}
    asked = {**ASKED, "max_output_tokens": 300, "text_format": Thing, "extra_body": {"logit_bias": bias}}
    parsed = openai_client.responses.parse(**asked)
    assert isinstance(parsed.output_parsed, Thing)
    with openai_client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    assert kinds[-1] == "response.completed"


def test_log_probabilities_are_those_of_the_chat(client):
    asked = {**ASKED, "max_output_tokens": 8, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    asked["extra_body"] = {"ignore_eos": True}
    chat = client.chat.completions.create(
        model="tiny",
        messages=[USER],
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},
    )

    def entries(logprobs):
        return [(e.token, e.bytes, pytest.approx(e.logprob), [o.token for o in e.top_logprobs]) for e in logprobs]

    expected = entries(chat.choices[0].logprobs.content)
    assert len(expected) == 8
    for answer in (client.responses.create(**asked), streamed(client, **asked)):
        assert entries(answer.output[0].content[0].logprobs) == expected
    deltas = [event for event in client.responses.create(**asked, stream=True) if event.type.endswith("text.delta")]
    assert [entry.token for delta in deltas for entry in delta.logprobs] == [token for token, *_ in expected]


def piece(**fields):
    return pb.GenerateResponse(chunk=pb.TokenChunk(tokens=[pb.Token(id=1, proposer="full")], **fields))


def test_text_after_a_call_is_an_item_of_its_own_and_nothing_an_empty_one(scripted):
    worker, gateway = scripted
    call = [pb.ToolCallChunk(id="c1", name="make"), pb.ToolCallChunk(arguments="{}")]
    worker.script = lambda request: [started(), chunk("a"), piece(tool_calls=call), chunk("b"), finished()]
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
        answer = streamed(client, **ASKED)
        assert [item.type for item in answer.output] == ["message", "function_call", "message"]
        assert [item.content[0].text for item in answer.output[::2]] == ["a", "b"]
        worker.script = lambda request: [started(), finished()]
        [item] = streamed(client, **ASKED).output
    assert (item.role, item.content[0].text, item.status) == ("assistant", "", "completed")


def test_a_stream_begins_stays_alive_and_fails_as_clients_expect_it(monkeypatch):
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.05)
    go_on = threading.Event()

    async def held():
        while not go_on.is_set():
            await asyncio.sleep(0.01)

    def script(request):
        yield from (started(), held(), chunk("a"))
        raise Unavailable("m", reason="SHUTTING_DOWN")

    with scripted_worker(script) as worker, gateway_to(worker.target) as gateway:
        with gateway.http.stream("POST", PATH, json={**ASKED, "stream": True}) as reply:
            lines = filter(None, reply.iter_lines())
            head = [next(lines) for _ in range(5)]
            assert head[::2] == ["event: response.created", "event: response.in_progress", ": waiting"]
            go_on.set()
            *_, name, data = [line for line in lines if line != ": waiting"]
        error = json.loads(data.removeprefix("data: "))
        assert (name, error["type"], error["code"]) == ("event: error", "error", error["error"]["code"])
        assert error["sequence_number"] > 4
        assert error["message"] == error["error"]["message"]
        with (
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client,
            pytest.raises(openai.APIError, match=error["message"]),
        ):
            list(client.responses.create(**ASKED, stream=True))


def test_what_is_kept_of_a_streamed_answer_is_counted(scripted):
    """Its last event has all of it."""
    worker, _ = scripted
    worker.script = lambda request: [started(), *[chunk("x" * 10_000)] * 200, finished()]
    with scripted_worker(worker.script) as own, gateway_to(own.target, body_budget_mb=2, max_body_mb=1) as gateway:
        reply = gateway.http.post(PATH, json={**ASKED, "stream": True})
        assert json.loads(reply.text.splitlines()[-2].removeprefix("data: "))["code"] == "answer_too_large"
        assert gateway.metrics.registry.get_sample_value("neap_gateway_body_bytes") == 0
