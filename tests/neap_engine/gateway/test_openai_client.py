"""The gateway in front of a real worker, as the `openai` package sees it."""

import asyncio
import json
from typing import Annotated, Literal

import openai
import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb
from pydantic import BaseModel, Field

from shared.rpc.pages import DEFAULT_PAGE_SIZE
from tests.gateways import chat_body, finished, started
from tests.worker import build_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]
GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
CHAT = {**GREEDY, "messages": MESSAGES}


@pytest.fixture(scope="module")
def direct(worker):
    """The answer that gRPC gives to the same greedy request: (text, Finished)."""
    request = pb.GenerateRequest(
        model_id="tiny",
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")]),
        stopping=pb.Stopping(max_tokens=12, ignore_eos=True),
    )
    with NeapClient(worker.target) as client, client.generate(request) as stream:
        events = list(stream)
        return stream.text, events[-1].finished


def test_a_chat_is_the_answer_of_the_worker(client, direct):
    answer = client.chat.completions.create(**CHAT, max_tokens=12)
    text, finished = direct
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == finished.usage.num_prompt_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    depth = answer.usage.model_extra["neap"]
    assert sum(depth["exits"].values()) == 12
    assert depth["mean_layers_per_token"] > 0
    neap = answer.choices[0].model_extra["neap"]
    assert (neap["policy"], neap["router_version"]) == ("exact", 1)


def test_a_stream_has_the_same_text_and_usage_if_asked_for(client, direct):
    stream = client.chat.completions.create(**CHAT, max_tokens=12, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == direct[0]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {last.id}
    whole = client.chat.completions.create(**CHAT, max_tokens=1)
    assert {chunk.system_fingerprint for chunk in [*chunks, last]} == {whole.system_fingerprint}
    assert whole.system_fingerprint == whole.choices[0].model_extra["neap"]["numerics_id"]
    assert (last.choices, last.usage.completion_tokens) == ([], 12)
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_drafts_of_all_choices_are_counted_under_the_names_of_vllm(scripted, is_chat):
    """In a stream where the usage is, and nowhere if nothing was drafted."""
    worker, gateway = scripted
    drafts = [(10, 4, 5), (6, 4, 3)]

    def body(**fields):
        given = chat_body() if is_chat else {"model": "tiny", "prompt": "hello"}
        return {**given, "n": len(drafts), "seed": 1, **fields}

    def answer(request):
        drafted, accepted, passes = drafts[request.sampling.seed - 1]
        depth = pb.DepthStatistics(num_drafted=drafted, num_accepted=accepted, num_deep_passes=passes)
        return [started(), finished(depth=depth)]

    worker.script = answer
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    expected = {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.5,
        "num_spec_steps": 8,
        "num_accepted_draft_tokens": 8,
        "num_draft_tokens": 16,
    }
    assert gateway.http.post(path, json=body()).json()["metrics"] == {"speculative_decoding": expected}
    for options in ({}, {"stream_options": {"include_usage": True}}):
        lines = gateway.http.post(path, json=body(stream=True, **options)).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        found = [chunk["metrics"] for chunk in chunks if "metrics" in chunk]
        assert found == ([{"speculative_decoding": expected}] if options else [])
        assert not options or "metrics" in chunks[-1]
    drafts[:] = [(0, 0, 5), (0, 0, 3)]
    assert "metrics" not in gateway.http.post(path, json=body()).json()


def test_each_chunk_has_the_usage_so_far_if_asked_for(client, gateway):
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    *chunks, last = client.chat.completions.create(**CHAT, max_tokens=12, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert (counts[0], counts[-1]) == (0, 12)
    assert counts == sorted(counts)
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens}


def test_events_end_with_done(gateway):
    reply = gateway.http.post("/v1/chat/completions", json=chat_body(stream=True, max_tokens=2))
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert "usage" not in json.loads(lines[-2].removeprefix("data: "))


def test_developer_messages_and_text_parts_reach_the_template(client):
    def answer(messages):
        reply = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=8)
        return reply.choices[0].message.content, reply.usage.prompt_tokens

    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    plain = [{"role": "system", "content": "in"}, {"role": "user", "content": "he\nllo"}]
    rich = [{"role": "developer", "content": "in"}, {"role": "user", "content": parts}]
    assert answer(rich) == answer(plain)


def test_a_message_can_be_sent_back_with_all_its_fields(client):
    first = client.chat.completions.create(**CHAT, max_tokens=4).choices[0].message
    messages = [*MESSAGES, first.model_dump(), {"role": "user", "content": "and?"}]
    again = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=4)
    assert again.usage.prompt_tokens > 4


def test_stop_strings_end_the_text(client, direct):
    text = direct[0]
    stop = text[3:5]
    answer = client.chat.completions.create(**CHAT, max_tokens=12, stop=stop)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["neap"]["stop_match"] == stop


def test_choices_of_one_seed_differ_and_repeat(client):
    def texts():
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=3, seed=-5, max_tokens=10, temperature=2.0
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_the_seed_of_an_answer_can_be_sent_again(client):
    """Also one that a number of JavaScript cannot hold, and one that the worker has chosen."""
    request = {"model": "tiny", "messages": MESSAGES, "max_tokens": 10, "temperature": 2.0}
    for seed in (None, 2**64 - 1, -5):
        first = client.chat.completions.create(**request, seed=seed).choices[0]
        again = client.chat.completions.create(**request, seed=first.model_extra["neap"]["seed"])
        assert again.choices[0].message.content == first.message.content
        assert again.choices[0].model_extra["neap"]["seed"] == first.model_extra["neap"]["seed"]


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"trace": "1"}, "store": True, "user": "u", "safety_identifier": "s"},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "service_tier": "auto"},
        {"reasoning_effort": "medium", "verbosity": "low", "modalities": ["text"]},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tool_choice": "auto", "parallel_tool_calls": False, "functions": []},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
        {"logprobs": False, "top_logprobs": 0, "n": 1, "stop": [], "seed": None},
        {"response_format": {"type": "text"}, "prediction": None},
        {"stream_options": {"include_usage": True}, "store": False, "metadata": {}},
        {"extra_body": {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0, "bad_words": []}},
        {"extra_body": {"skip_special_tokens": True, "use_beam_search": False}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_ask_for_nothing_change_nothing(client, fields):
    request = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    plain = client.chat.completions.create(**request, messages=MESSAGES)
    named = [{**MESSAGES[0], "name": "ann"}]
    answer = client.chat.completions.create(**request, messages=named, **fields)
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens


PREDICTIONS = {"text": str, "parts": lambda text: [{"type": "text", "text": t} for t in (text[:3], text[3:])]}


@pytest.mark.parametrize("form", PREDICTIONS)
def test_a_prediction_changes_nothing_but_the_usage(client, form):
    plain = client.chat.completions.create(**CHAT, max_tokens=24)
    text = plain.choices[0].message.content
    whole, half = (
        client.chat.completions.create(
            **CHAT, max_tokens=24, prediction={"type": "content", "content": PREDICTIONS[form](own)}
        )
        for own in (text, text[: len(text) // 2] + "~")
    )
    counts = []
    for answer in (plain, half, whole):
        assert answer.choices[0].message.content == text
        assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
        details = answer.usage.completion_tokens_details
        counts.append((details.accepted_prediction_tokens, details.rejected_prediction_tokens))
    assert counts[0] == (0, 0)
    assert 0 < counts[1][0] < counts[2][0]
    assert counts[1][1] >= 1
    *_, last = client.chat.completions.create(
        **CHAT,
        max_tokens=24,
        prediction={"type": "content", "content": text},
        stream=True,
        stream_options={"include_usage": True},
    )
    assert last.usage.completion_tokens_details.accepted_prediction_tokens == counts[2][0]


def test_penalties_and_biases_have_their_effect(client):
    def answer(**fields):
        extra = {**GREEDY["extra_body"], **fields.pop("extra_body", {})}
        found = client.completions.create(
            **{**GREEDY, "extra_body": extra}, prompt="hello", max_tokens=24, logprobs=0, **fields
        )
        return found.choices[0].logprobs.tokens, found.choices[0].text

    tokens, text = answer()
    assert len(set(answer(presence_penalty=2.0, frequency_penalty=2.0)[0])) > len(set(tokens))
    first = build_tokenizer()(tokens[0], add_special_tokens=False)["input_ids"][-1]
    assert answer(logit_bias={str(first): -100})[0][0] != tokens[0]
    assert set(answer(logit_bias={str(first): 100})[0]) == {tokens[0]}
    word = text[4:6]
    assert word not in answer(extra_body={"bad_words": [word]})[1]


def test_choices_share_the_keys_and_values_of_their_prompt(client):
    prompt = "the seven sleepers of the long prompt " * 12
    answer = client.completions.create(model="tiny", prompt=prompt, n=4, seed=5, max_tokens=8, temperature=2.0)
    assert len({choice.text for choice in answer.choices}) == 4
    of_one = answer.usage.prompt_tokens // 4
    assert of_one > 100
    # All but the last token, which each reads for its own first token.
    assert answer.usage.prompt_tokens_details.cached_tokens >= 3 * (of_one - 16)
    texts = [
        client.completions.create(model="tiny", prompt=prompt, seed=5 + index, max_tokens=8, temperature=2.0)
        .choices[0]
        .text
        for index in range(4)
    ]
    assert [choice.text for choice in answer.choices] == texts, "each is the answer to its own seed"


def test_several_streamed_choices_are_told_apart_by_index(client):
    whole = client.completions.create(**GREEDY, prompt=["hello", "th"], max_tokens=6)
    texts = ["", ""]
    reasons = [None, None]
    for chunk in client.completions.create(**GREEDY, prompt=["hello", "th"], max_tokens=6, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["length", "length"]


def test_absent_temperature_is_one(client):
    sampled = {"model": "tiny", "prompt": "hello", "seed": 3, "max_tokens": 12}
    absent = client.completions.create(**sampled).choices[0].text
    assert absent == client.completions.create(**sampled, temperature=1).choices[0].text
    assert absent != client.completions.create(**sampled, temperature=0).choices[0].text


def test_completions_have_16_tokens_unless_told_otherwise(client):
    assert client.completions.create(**GREEDY, prompt="hello").usage.completion_tokens == 16


def test_prompts_may_be_token_ids(client):
    ids = build_tokenizer()("hello").input_ids
    by_text = client.completions.create(**GREEDY, prompt="hello", max_tokens=6)
    by_ids = client.completions.create(**GREEDY, prompt=ids, max_tokens=6)
    assert by_ids.choices[0].text == by_text.choices[0].text


def test_the_depth_policy_and_the_router_can_be_chosen(client, direct):
    def answer(neap):
        extra = {"ignore_eos": True, "neap": neap}
        return client.chat.completions.create(**{**CHAT, "extra_body": extra}, max_tokens=12)

    full = answer({"policy": "full"})
    assert full.choices[0].message.content == direct[0]
    assert full.usage.model_extra["neap"]["mean_layers_per_token"] > 0
    assert full.choices[0].model_extra["neap"]["router_version"] == 0
    relaxed = answer({"policy": "relaxed", "threshold": 0.9, "router_version": 1})
    assert relaxed.choices[0].model_extra["neap"]["policy"] == "relaxed"


def test_models_are_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert model.model_extra["neap"]["num_layers"] == 4
    assert client.models.retrieve("tiny").id == "tiny"


def test_all_pages_of_models_are_listed(scripted):
    worker, gateway = scripted
    worker.models = [f"model-{number:03}" for number in range(2 * DEFAULT_PAGE_SIZE + 1)]
    found = gateway.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in found] == worker.models


def test_an_async_client_can_stream_many_answers(gateway):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x") as client:

            async def one():
                stream = await client.chat.completions.create(**CHAT, max_tokens=6, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*(one() for _ in range(8)))

    assert len(set(asyncio.run(main()))) == 1


class Thing(BaseModel):
    kind: Literal["thin", "é😀"]
    sizes: Annotated[list[Literal[1, 12]], Field(max_length=2)]
    other: bool | None


def test_an_answer_is_parsed_as_what_was_asked_for(client):
    asked = {"model": "tiny", "messages": MESSAGES, "response_format": Thing, "max_tokens": 100}
    for seed in range(4):
        answer = client.chat.completions.parse(**asked, temperature=1.5, seed=seed)
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Thing)
    greedy = client.chat.completions.parse(**asked, temperature=0)
    with client.chat.completions.stream(**asked, temperature=0) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == greedy.choices[0].message.parsed
    assert greedy.usage.model_extra["neap"]["exits"]["grammar"] > 5


def test_a_completion_is_a_json_object(client):
    for kind in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any"}}):
        answer = client.completions.create(
            model="tiny", prompt="hello", max_tokens=6, extra_body={"response_format": kind}
        )
        assert answer.choices[0].text.startswith("{")


def test_a_schema_that_nobody_can_satisfy_is_refused_by_name(client):
    schema = {"name": "none", "schema": {"type": "integer", "minimum": 2, "maximum": 1}}
    with pytest.raises(openai.BadRequestError, match="minimum") as caught:
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format={"type": "json_schema", "json_schema": schema}
        )
    assert caught.value.code == "constraint_invalid"
