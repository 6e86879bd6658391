"""Chats with tools and reasoning over real gRPC: every way of writing calls, every policy, resumed, and refused."""

import asyncio
import json
import threading
from contextlib import closing, contextmanager
from types import SimpleNamespace

import grpc
import jsonschema
import pytest
from neap_client import NeapClient, generate_request
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc

from inference_service.chat import PreparedChat
from inference_service.convert import to_generation_request
from shared.blocking import BlockingPool
from shared.chat.formats import call_format
from shared.constraints.constraint import Constraint
from shared.engine.request.prompt import encode_prompt
from shared.engine.step import Decoder
from shared.registry.factory import open_registry
from tests.chats import WAYS, build_chat_model
from tests.fixed_costs import fixed_cost_engine
from tests.generation import EXACT, FULL, publish, refused, request_of
from tests.tiers import tiered
from tests.worker import CONTEXT_LENGTH, EOS, serving

SCHEMAS = {
    "add": {
        "type": "object",
        "properties": {"a": {"enum": [1, 12]}, "text": {"type": "string", "maxLength": 3}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "go": {
        "type": "object",
        "properties": {"to": {"enum": ["é😀", "hello"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}  # fmt: skip
TOOLS = [pb.Tool(name=name, description="d", parameters=json.dumps(own)) for name, own in SCHEMAS.items()]
REQUIRED = pb.ToolChoice(required=pb.AnyTool())
USER = [pb.ChatMessage(role="user", content="hello")]
SAMPLED = pb.Sampling(temperature=1.0, seed=5)
STOPPING = pb.Stopping(max_tokens=200)


@contextmanager
def served(registry, template, **options):
    loaded = build_chat_model(template, **options)
    with fixed_cost_engine(loaded) as engine:
        publish(registry, engine)
        with serving(engine, registry) as worker:
            worker.loaded = loaded
            yield worker


@pytest.fixture(scope="module", params=tiered(WAYS, {"hermes", "in thought", "channels"}))
def worker(request, tmp_path_factory):
    registry = open_registry(str(tmp_path_factory.mktemp("registry")))
    with served(registry, WAYS[request.param], own_tokens=True) as worker:
        worker.template = request.param
        yield worker
    registry.close()


@pytest.fixture(scope="module")
def stub(worker):
    with grpc.insecure_channel(worker.target) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def message(events):
    """(token ids, reasoning, text, [(name, arguments)], Finished) of a call's events."""
    tokens, reasoning, text, calls = [], "", "", []
    for event in events:
        tokens += [token.id for token in event.chunk.tokens]
        for part in (event.chunk, event.finished):
            reasoning, text = reasoning + part.reasoning, text + part.text
            for piece in part.tool_calls:
                if piece.id:
                    calls.append([piece.name, ""])
                calls[piece.index][1] += piece.arguments
    return tokens, reasoning, text, calls, event.finished


def chat(**fields):
    return pb.Chat(**{"messages": USER, "tools": TOOLS, "tool_choice": REQUIRED, **fields})


def biased(worker, **fields):
    """Begins calls, and ends reasoning, as soon as it may."""
    vocabulary = worker.loaded.tokenizer.get_added_vocab()
    tags = vocabulary.keys() & {"<tool_call>", "[TOOL_CALLS]", "</think>", "<|end|>", "<|message|>"}
    return pb.Sampling(logit_bias={vocabulary[tag]: 100 for tag in tags}, **fields)


@pytest.mark.parametrize("seed", [None, 5], ids=["greedy", "sampled"])
def test_a_call_that_is_required_is_there_and_exact_gives_the_tokens_of_full(stub, worker, seed):
    sampling = biased(worker, temperature=seed and 1.0, seed=seed)
    asked = chat(single_tool_call=True)
    full, exact = (
        message(stub.Generate(request_of(chat=asked, depth=depth, sampling=sampling, stopping=STOPPING)))
        for depth in (FULL, EXACT)
    )
    assert full[:4] == exact[:4]
    tokens, _, text, calls, _ = full
    assert (tokens[-1], text) == (EOS, "")
    [[name, arguments]] = calls
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    exits = {own.proposer: own.num_tokens for own in exact[4].depth.exits}
    assert exits["grammar"] > 10


def in_pieces(stub, request):
    """The events of a call whose reader is not behind: it would get few pieces. A step waits for the last one's reader,
    but not for long, because not every step has an event."""
    with pytest.MonkeyPatch.context() as patch:
        step, read = Decoder.step, threading.Semaphore(0)

        def after_the_reader(self, sequences):
            read.acquire(timeout=0.1)
            return step(self, sequences)

        patch.setattr(Decoder, "step", after_the_reader)
        for event in stub.Generate(request, timeout=60):
            yield event
            read.release()


def test_a_call_goes_on_where_another_worker_ended(stub, worker):
    """Reasoning, text and calls are pieced together at any seam, inside tags and characters."""
    request = request_of(chat=chat(), depth=FULL, sampling=biased(worker), stopping=STOPPING)
    for _ in range(20):  # some answers are short
        started, *events = in_pieces(stub, request)
        if len(events) > 8:
            break
    tokens, *said, finished = message(events)
    assert len(events) > 8
    request.sampling.seed = started.started.seed
    for cut in (*range(1, min(len(events), 60), 3), len(events) - 1):
        first = events[:cut]
        request.resume.CopyFrom(pb.Resume(token_ids=message(first)[0]))
        _, *rest = stub.Generate(request, timeout=60)
        if cut == len(events) - 1:
            assert not message(rest)[0]
        again_tokens, *again, end = message([*first, *rest])
        assert (again_tokens, again, end.reason) == (tokens, said, finished.reason)
        assert end.usage.num_reasoning_tokens == finished.usage.num_reasoning_tokens


def test_a_named_tool_is_called(stub, worker):
    asked = chat(tool_choice=pb.ToolChoice(name="go"))
    request = request_of(chat=asked, sampling=biased(worker), stopping=STOPPING)
    _, _, _, calls, _ = message(stub.Generate(request, timeout=60))
    assert [name for name, _ in calls] == ["go"]


def test_free_text_is_free_and_calls_in_it_are_held_to_the_schema(stub, worker):
    asked = pb.Chat(messages=USER, tools=TOOLS)
    plain = request_of(chat=asked, sampling=SAMPLED, stopping=STOPPING)
    tokens, reasoning, text, _, finished = message(stub.Generate(plain, timeout=60))
    assert reasoning or text
    num_reasoning = finished.usage.num_reasoning_tokens
    assert (num_reasoning > 0, num_reasoning < len(tokens)) == (bool(reasoning), bool(text))
    full, exact = (
        message(stub.Generate(request_of(chat=asked, depth=depth, sampling=biased(worker), stopping=STOPPING)))
        for depth in (FULL, EXACT)
    )
    assert full[:4] == exact[:4]
    *_, calls, finished = full
    if call_format(worker.loaded).tag in worker.loaded.tokenizer.get_added_vocab():
        assert calls
        for name, arguments in calls[: None if finished.reason == pb.FINISH_REASON_EOS else -1]:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_how_an_answer_is_read_follows_from_how_it_was_asked_for(worker):
    """Bare calls are read where text is free, tags in it where it is not bound, and one call where one is allowed. In a
    text that has a channel of its own none is read."""
    bare = 'so {"name": "go", "arguments": {}}'
    answer = Constraint(json_object=True)
    for fields, constraint, num_calls in (
        ({"tool_choice": None}, None, 2),
        ({"tool_choice": None, "single_tool_call": True}, None, 1),
        ({}, None, 0),
        ({"tool_choice": None}, answer, 0),
    ):
        prepared = PreparedChat(chat(**fields), worker.loaded)
        if constraint and not call_format(worker.loaded).tag:
            continue
        parser = prepared.parser([1], prepared.constraint(constraint, [1]))
        parts = [parser.push(f"</think>{bare} {bare}"), parser.finish("")]
        num_calls *= worker.template != "channels"
        assert sum(bool(call.id) for part in parts for call in part.calls) == num_calls
    if tag := call_format(worker.loaded).tag:
        prepared = PreparedChat(chat(tool_choice=None), worker.loaded)
        parser = prepared.parser([1], prepared.constraint(answer, [1]))
        assert parser.push(f'{{"a": "{tag}"}}').text == f'{{"a": "{tag}"}}'


def test_tools_that_may_not_be_called_are_not_shown(stub, worker):
    def num_prompt_tokens(**fields):
        request = request_of(1, chat=pb.Chat(messages=USER, **fields))
        request.stopping.ignore_eos = False
        return next(stub.Generate(request, timeout=60)).started.num_prompt_tokens

    none = pb.ToolChoice(none=pb.NoTool())
    assert num_prompt_tokens(tools=TOOLS, tool_choice=none) == num_prompt_tokens()
    assert num_prompt_tokens(tools=TOOLS) > num_prompt_tokens()


def test_calls_and_their_results_are_a_prompt(stub, worker):
    call = pb.ToolCall(id="abcdefgh1", name="add", arguments='{"a": 1}')
    called = pb.ChatMessage(role="assistant", tool_calls=[call])
    result = pb.ChatMessage(role="tool", content="12", tool_call_id="abcdefgh1")
    asked = pb.Chat(messages=[*USER, called, result], tools=TOOLS)
    with NeapClient(worker.target) as client:
        answer = client.answer(generate_request("tiny", asked, policy="full", seed=1, temperature=1.0, max_tokens=40))
    assert answer.started.num_prompt_tokens > 80
    assert answer.text or answer.reasoning or answer.tool_calls
    if not call_format(worker.loaded).takes_text:
        for arguments in ("x", "[1]", "3"):
            asked.messages[1].tool_calls[0].arguments = arguments
            _, info, text = refused(stub, request_of(chat=asked))
            assert (info.reason, "messages[1].tool_calls" in text) == ("INVALID_INPUT", True)


def test_a_client_has_the_whole_message(stub, worker):
    with NeapClient(worker.target) as client:
        request = request_of(chat=chat(), sampling=biased(worker), stopping=STOPPING)
        answer = client.answer(request)
    _, reasoning, text, calls, _ = message(stub.Generate(request, timeout=60))
    assert (answer.reasoning, answer.text) == (reasoning, text)
    assert [[call.name, call.arguments] for call in answer.tool_calls] == calls


def test_a_tool_that_cannot_be_enforced_stops_no_others_and_names_may_have_dots(stub, worker):
    """What is left out is named; a strict tool is refused with its place."""
    parameters = json.dumps({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    tools = [*TOOLS, pb.Tool(name="mcp.files:read/all", parameters=parameters)]
    asked = chat(tools=tools, tool_choice=pb.ToolChoice(name=tools[-1].name))
    started, *events = stub.Generate(request_of(chat=asked, sampling=biased(worker), stopping=STOPPING), timeout=60)
    assert list(started.started.warnings) == ["tools[2].parameters: #/properties/a/uniqueItems is not enforced"]
    [[name, _]] = message(events)[3]
    assert name == tools[-1].name
    tools[-1].strict = True
    _, info, text = refused(stub, request_of(chat=chat(tools=tools)))
    assert (info.reason, info.metadata["field"]) == ("CONSTRAINT_INVALID", "tools[2].parameters")
    assert "uniqueItems" in text


def test_messages_are_looked_at_a_fixed_number_of_times(worker):
    """However many there are; and a result has the name of the last call with its id before it."""

    class Counted(list):
        num_seen = 0

        def __getitem__(self, place):
            found = super().__getitem__(place)
            self.num_seen += len(found) if isinstance(place, slice) else 1
            return found

        def __iter__(self):
            for message in super().__iter__():
                self.num_seen += 1
                yield message

    calls = [pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="a", name=name)]) for name in ("go", "add")]
    results = [pb.ChatMessage(role="tool", tool_call_id=own) for own in ("a", "b")]
    messages = Counted([*USER, calls[0], *results, calls[1], *(300 * results)])
    flags = {"single_tool_call": False, "continues_last_message": False}
    asked = SimpleNamespace(messages=messages, tools=TOOLS, tool_choice=REQUIRED, template_arguments="", **flags)
    for call in calls:
        call.tool_calls[0].arguments = "{}"
    prompt = PreparedChat(asked, worker.loaded).prompt
    assert messages.num_seen <= 4 * len(messages)
    assert [m.get("name") for m in prompt.messages if m["role"] == "tool"] == ["go", None] + 300 * ["add", None]


def test_an_answer_goes_on_with_the_last_message(stub, worker):
    """As if the model had written its text, in thought or not; special tokens in it stay text."""
    tokenizer = worker.loaded.tokenizer

    def prompt(messages, **fields):
        return encode_prompt(worker.loaded, PreparedChat(pb.Chat(messages=messages, **fields), worker.loaded).prompt)

    for begun in ("he said", "a <eos> b ", "<think>\nfirst"):
        messages = [*USER, pb.ChatMessage(role="assistant", content=begun)]
        ids = prompt(messages, continues_last_message=True)
        assert EOS not in ids[-len(begun) :]
        assert tokenizer.decode(ids).rstrip().endswith(begun.rstrip())
        assert prompt(messages)[: len(ids) - 1] == ids[:-1], "no other beginning than in a conversation that goes on"
        asked = pb.Chat(messages=messages, continues_last_message=True)
        stopping = pb.Stopping(max_tokens=8, ignore_eos=True)
        tokens, reasoning, text, *_ = message(stub.Generate(request_of(chat=asked, stopping=stopping)))
        raw = pb.GenerateRequest(model_id="tiny", token_ids=pb.TokenIds(ids=ids), stopping=stopping)
        assert tokens == message(stub.Generate(raw))[0]
        in_thought = "think" in begun and "thought" in worker.template.replace("thinking", "thought")
        assert bool(reasoning) == in_thought
        assert not in_thought or not text


@pytest.mark.parametrize(
    "messages",
    [
        [],
        USER,
        [pb.ChatMessage(role="assistant", content=" ")],
        [pb.ChatMessage(role="assistant", content="x", tool_calls=[pb.ToolCall(id="a", name="go", arguments="{}")])],
        [pb.ChatMessage(role="assistant", content="x"), *USER],
    ],
    ids=["none", "of a user", "empty", "with a call", "not the last"],
)
def test_only_text_of_an_assistant_can_be_continued(stub, messages):
    asked = request_of(chat=pb.Chat(messages=messages, continues_last_message=True))
    code, info, text = refused(stub, asked)
    assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_INPUT")
    assert text.endswith("only text of an assistant can be continued")


def test_a_prompt_is_not_tokenised_for_a_caller_who_has_gone(worker, monkeypatch):
    rendering, gone, tokenised = threading.Event(), threading.Event(), []

    def render(*_):
        rendering.set()
        assert gone.wait(60)
        return ""

    async def call_and_go():
        with closing(BlockingPool(1)) as pool:
            preparing = asyncio.create_task(pool.call(encode_prompt, worker.loaded, [{"role": "user", "content": "x"}]))
            await asyncio.to_thread(rendering.wait, 60)
            preparing.cancel()
            await asyncio.wait([preparing])
            gone.set()

    monkeypatch.setattr("shared.engine.request.prompt.render", render)
    monkeypatch.setattr("shared.engine.request.prompt.encode_rendered", lambda *_: tokenised.append(1))
    asyncio.run(call_and_go())
    assert not tokenised


def test_a_setting_gives_control_tokens_of_messages_their_effect(worker):
    asked = pb.Chat(messages=[pb.ChatMessage(role="user", content=100 * "<eos>")])
    request = request_of(chat=asked)
    text, tokens = (
        to_generation_request(request, worker.loaded, request_id="", chats_have_control_tokens=own)[0].prompt_ids
        for own in (False, True)
    )
    assert (text.count(EOS) + 100, len(text)) == (tokens.count(EOS), len(tokens) + 400)


@pytest.mark.parametrize(
    ("fields", "reason", "place"),
    [
        ({"tools": [pb.Tool(name="a b")]}, "INVALID_INPUT", "tools[0].name"),
        ({"tools": [TOOLS[0]] * 2}, "INVALID_INPUT", "tools[1].name"),
        ({"tools": [pb.Tool(name="a", parameters="{")]}, "INVALID_INPUT", "tools[0].parameters"),
        ({"tools": [pb.Tool(name="a", parameters='{"type": "string"}')]}, "INVALID_INPUT", "tools[0].parameters"),
        (
            {"tools": [TOOLS[0], pb.Tool(name="a", parameters='{"properties": {"b": {"type": "objekt"}}}')]},
            "CONSTRAINT_INVALID",
            "tools[1].parameters",
        ),
        ({"tools": [pb.Tool(name="a", parameters=json.dumps({"description": "x" * 70_000}))]}, "PROMPT_TOO_LONG", ""),
        ({"tool_choice": pb.ToolChoice(name="other")}, "INVALID_INPUT", "tool_choice"),
        ({"tools": [], "tool_choice": REQUIRED}, "INVALID_INPUT", "tool_choice"),
        ({"template_arguments": "[]"}, "INVALID_INPUT", "template_arguments"),
        ({"template_arguments": '{"tools": 1}'}, "INVALID_INPUT", ""),
        ({"template_arguments": json.dumps({"x": "x" * 16384})}, "INVALID_INPUT", "template_arguments"),
        ({"messages": [pb.ChatMessage(role="assistant", tool_calls=CONTEXT_LENGTH * [{}])]}, "PROMPT_TOO_LONG", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_with_its_place(stub, fields, reason, place):
    code, info, message = refused(stub, request_of(chat=chat(**fields)))
    assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, reason), message
    assert info.metadata.get("field", "") == place
