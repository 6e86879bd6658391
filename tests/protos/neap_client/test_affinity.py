"""Requests that begin alike go to the same worker, while it has room."""

import asyncio
import threading
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from neap_client.affinity import WORKER_KEY, KnownWorkers, prefix_key
from neap_client.inference.v1 import inference_pb2 as pb

from shared import errors
from tests.servers import free_ports
from tests.shared.rpc.conftest import Scripted, running
from tests.waiting import wait_until

CHUNK = pb.GenerateResponse(chunk=pb.TokenChunk(text="a", tokens=[pb.Token(id=97)]))
FINISHED = pb.GenerateResponse(finished=pb.Finished())
NUM_PROMPTS = 60


def _chat(*contents):
    roles = ("system", "user", "assistant", "user")
    named = zip(roles, contents, strict=False)
    messages = [pb.ChatMessage(role=role, content=content) for role, content in named]
    return pb.GenerateRequest(chat=pb.Chat(messages=messages))


def _text(text):
    return pb.GenerateRequest(text=text)


def _ids(*ids):
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))


LONG = "x" * 300


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_chat("be brief", "hello"), _chat("be brief", "hello", "Hi!", "and now?")),
        (_text(LONG), _text(LONG + "y")),
        (_ids(*range(70)), _ids(*range(80))),
    ],
)
def test_what_begins_alike_has_one_key(one, other):
    assert prefix_key(one) == prefix_key(other) != ""


def test_what_begins_otherwise_has_another_key():
    chats = [_chat("be brief", "hello"), _chat("be brief", "goodbye"), _chat("be long", "hello")]
    others = [_text("x"), _text(LONG), _ids(1), _ids(1, 2), pb.GenerateRequest(model_id="m")]
    keys = {prefix_key(request) for request in chats + others}
    assert len(keys) == len(chats + others)


def _two(server):
    """A target of two addresses, at one of which nothing listens, so that the other one gets all calls."""
    return f"ipv4:{server.target},127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def workers():
    """Starts servers, each of which notes the prompts that it answers. `targets` of all that shall be known."""

    class Workers:
        def __init__(self, stack):
            self._stack, self.ports, self.seen = stack, free_ports(4), []

        def start(self, on_generate=None):
            servicer, seen = Scripted(), []

            async def generate(request, context):
                seen.append(request.text)
                yield CHUNK
                yield FINISHED

            servicer.on_generate = on_generate or generate
            listen = f"127.0.0.1:{self.ports[len(self.seen)]}"
            self._stack.enter_context(running(servicer, listen=listen))
            self.seen.append(seen)

        def ask(self, make_client):
            """Returns prompt -> the worker that answers it, once each is answered by one alone."""
            target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in self.ports[: len(self.seen)])
            places = []

            def are_settled():
                for seen in self.seen:
                    seen.clear()
                for number in list(range(NUM_PROMPTS)) * 2:
                    list(client.generate(_text(f"prompt {number}")))
                found = {(prompt, at) for at, seen in enumerate(self.seen) for prompt in seen}
                places[:] = [dict(found)]
                return len(found) == NUM_PROMPTS

            with make_client(target, num_attempts=9) as client:
                wait_until(are_settled)
            return places[0]

    with ExitStack() as stack:
        yield Workers(stack)


def test_a_new_worker_takes_its_part_and_nothing_else_moves(workers, make_client):
    for _ in range(3):
        workers.start()
    before = workers.ask(make_client)
    assert set(before.values()) == {0, 1, 2}
    workers.start()
    after = workers.ask(make_client)
    moved = {prompt for prompt in before if after[prompt] != before[prompt]}
    assert {after[prompt] for prompt in moved} == {3}
    assert len(moved) < NUM_PROMPTS / 2


def test_without_affinity_one_prompt_goes_in_turn(workers, make_client):
    for _ in range(3):
        workers.start()
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in workers.ports[:3])
    with make_client(target, num_attempts=9, has_affinity=False) as client:
        wait_until(lambda: list(client.generate(_text("a"))) and all(workers.seen))


def test_a_worker_without_room_is_passed_over(scripted, server, make_client):
    """Twice a worker may refuse; the third one lets the call wait. None of this is a failed attempt. A call that
    resumes an answer waits at a worker of the list, which is not the one that was lost."""
    asked = []

    async def generate(request, context):
        given = dict(context.invocation_metadata())
        asked.append((WORKER_KEY in given, request.can_go_elsewhere))
        if request.can_go_elsewhere:
            raise errors.Unavailable("full", reason="BUSY")
        begun = pb.Started(num_resumed_tokens=len(request.resume.token_ids))
        yield pb.GenerateResponse(started=begun)
        yield CHUNK
        if len(asked) == 3:
            raise errors.Unavailable("gone")
        yield FINISHED

    scripted.on_generate = generate
    with make_client(_two(server), num_attempts=2) as client:
        stream = client.generate(_text("a"))
        assert [event.chunk.text for event in stream] == ["", "a", "a", ""]
    once = [(True, True), (True, True), (False, False)]
    assert asked == [*once, *once[:2], (True, False)]


def test_an_interrupted_answer_goes_on_at_the_next_worker(scripted, server, make_client):
    addresses = []

    async def generate(request, context):
        addresses.append(dict(context.invocation_metadata())[WORKER_KEY])
        begun = pb.Started(num_resumed_tokens=len(request.resume.token_ids))
        yield pb.GenerateResponse(started=begun)
        yield CHUNK
        if len(addresses) < 3:
            raise errors.Unavailable("gone")
        yield FINISHED

    scripted.on_generate = generate
    with make_client(_two(server), num_attempts=2) as client:
        list(client.generate(_text("a")))
    first, second, third = addresses
    assert first == third != second


@pytest.mark.parametrize("resumes", ["always", "exactly"])
def test_workers_of_equal_numerics_are_asked_first(workers, make_client, resumes):
    """Each of the others is asked whether it goes on exactly. If none does, the answer goes on at one of them, or
    ends."""
    asked, ids = [], {}

    def generate_as(own):
        async def generate(request, context):
            asked.append((own, request.resume.only_exactly))
            numerics_id = ids[own]
            if request.resume.only_exactly and request.resume.numerics_id != numerics_id:
                raise errors.PreconditionFailed("other numerics", reason="NUMERICS_DIFFER")
            num_resumed = len(request.resume.token_ids)
            begun = pb.Started(
                num_resumed_tokens=num_resumed, numerics_id=numerics_id, exact_promise=pb.EXACT_PROMISE_TOKENS_OF_FULL
            )
            yield pb.GenerateResponse(started=begun)
            yield CHUNK
            if not num_resumed:
                raise errors.Unavailable("gone")
            yield FINISHED

        return generate

    for number in range(3):
        workers.start(generate_as(number))
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in workers.ports[:3])
    with make_client(target, num_attempts=9, resumes=resumes) as client:
        ids |= {0: "a", 1: "a", 2: "a"}
        wait_until(lambda: client.answer(_text("a")).resumptions and len(set(asked[-2:])) == 2)
        (first, _), (second, _) = asked[-2:]
        (third,) = {0, 1, 2} - {first, second}
        ids[second] = "b"
        asked.clear()
        client.answer(_text("a"))
        assert asked == [(first, False), (second, True), (third, True)]
        ids[third] = "b"
        asked.clear()
        stream = client.generate(_text("a"))
        if resumes == "exactly":
            with pytest.raises(errors.PreconditionFailed) as caught:
                list(stream)
            assert (caught.value.reason, list(stream.token_ids)) == ("NUMERICS_DIFFER", [97])
            return
        list(stream)
        assert [one.numerics_id for one in stream.resumptions] == ["b"]
        *before, (last, last_only) = asked
        assert before == [(first, False), (second, True), (third, True)]
        assert last != first
        assert not last_only


def test_a_worker_that_refuses_unasked_is_an_error(scripted, server, make_client):
    async def generate(request, context):
        raise errors.Unavailable("full", reason="BUSY")
        yield

    scripted.on_generate = generate
    with make_client(_two(server), num_attempts=2) as client:
        stream = client.generate(_text("a"))
        with pytest.raises(errors.Unavailable, match="full"):
            next(stream)
    assert scripted.num_calls == 4


def test_a_serialized_request_goes_by_the_prefix_that_is_given(scripted, server, make_client):
    addresses = []

    async def generate(request, context):
        addresses.append(dict(context.invocation_metadata()).get(WORKER_KEY))
        yield CHUNK
        yield FINISHED

    scripted.on_generate = generate
    keys = {prefix_key(_text(str(number))) for number in range(20)}
    target = _two(server)
    with make_client(target) as client:
        for prefix in ("", None, *keys):
            list(client.generate(_text("a").SerializeToString(), prefix=prefix))
    assert addresses[:2] == [None, None]
    assert set(addresses[2:]) == {f"{address}_0" for address in target[5:].split(",")}


def test_a_popular_prefix_is_shared():
    known, ended = KnownWorkers("ipv4:127.0.0.1:1,127.0.0.2:1,127.0.0.3:1"), []
    order, taken = known.ranked("a"), Counter()
    for _ in range(12):
        address = known.ranked("a")[0]
        taken[address] += 1
        known.count(address, SimpleNamespace(add_done_callback=ended.append))
    # 1.25 times its share for the first, as long as the calls run.
    assert [taken[address] for address in order] == [5, 5, 2]
    for callback in ended:
        callback(None)
    assert known.ranked("a") == order


def test_a_call_counts_until_it_ends(scripted, server, make_client):
    may_end = threading.Event()

    async def generate(request, context):
        yield CHUNK
        await asyncio.to_thread(may_end.wait, 60)
        yield FINISHED

    scripted.on_generate = generate
    with make_client(_two(server)) as client:
        stream = client.generate(_text("a"))
        next(stream)
        assert list(client._known._num_running.values()) == [1]
        may_end.set()
        list(stream)
        wait_until(lambda: not client._known._num_running)


def test_names_are_resolved_and_other_targets_have_no_order():
    known = KnownWorkers("localhost:7071")
    wait_until(lambda: {"127.0.0.1:7071", "[::1]:7071"} & known._addresses)
    two = KnownWorkers("ipv6:[::1]:7071,[::2]:7072")
    assert sorted(two.ranked("a")) == ["[::1]:7071", "[::2]:7072"]
    assert {tuple(two.ranked(str(number))) for number in range(20)} >= {("[::1]:7071", "[::2]:7072")}
    assert two.ranked("") == KnownWorkers("127.0.0.1:7071").ranked("a") == []
    for target in ("dns://127.0.0.1:53/neap:7071", "unix:/tmp/socket", "xds:///worker"):
        assert KnownWorkers(target).ranked("a") == []
