"""Which generations a client repeats, when, and which errors it passes on."""

import asyncio
import threading
import time

import pytest
from neap_client.inference.v1 import inference_pb2 as pb

from shared import errors
from tests.reasons import raises

REQUEST = pb.GenerateRequest(model_id="m")


@pytest.fixture
def client(server, make_client):
    with make_client(server.target, num_attempts=3) as client:
        yield client


def _started(number):
    return pb.GenerateResponse(started=pb.Started(seed=number))


def _chunk(token_id):
    token = pb.Token(id=token_id)
    return pb.GenerateResponse(chunk=pb.TokenChunk(text=chr(token_id), tokens=[token]))


FINISHED = pb.GenerateResponse(finished=pb.Finished(text="!"))


def _script(scripted, *attempts):
    """Let the n-th call yield the events of `attempts[n]` and raise an error among them."""

    async def generate(request, context):
        for event in attempts[scripted.num_calls - 1]:
            if isinstance(event, errors.NeapError):
                raise event
            yield event

    scripted.on_generate = generate


def test_a_whole_answer_has_what_the_stream_brought(scripted, client):
    usage, depth = pb.Usage(num_completion_tokens=2), pb.DepthStatistics(num_drafted=3)
    reason = pb.FINISH_REASON_STOP_STRING
    last = pb.Finished(reason=reason, usage=usage, depth=depth, text="!")
    broken = [_started(1), errors.Unavailable("gone")]
    whole = [_started(2), _chunk(97), _chunk(98), pb.GenerateResponse(finished=last)]
    _script(scripted, broken, whole)
    answer = client.answer(REQUEST, timeout_s=60)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("ab!", (97, 98), "stop_string")
    assert (answer.started.seed, answer.usage, answer.depth) == (2, usage, depth)


@pytest.mark.parametrize("events", [[_started(1), _chunk(97)], [_started(1)], []])
def test_half_an_answer_is_no_answer(scripted, client, events):
    _script(scripted, events)
    with raises(errors.Unavailable, "INCOMPLETE_ANSWER"):
        client.answer(REQUEST)
    _script(scripted, [_started(1), errors.Exhausted("too slow", reason="SLOW_READER")])
    scripted.num_calls = 0
    with pytest.raises(errors.Exhausted, match="too slow"):
        client.answer(REQUEST)


def test_a_call_that_broke_after_started_is_made_again_and_shows_one_started(scripted, client):
    gone = errors.Unavailable("gone")
    _script(scripted, [_started(1), gone], [gone], [_started(3), _chunk(97), FINISHED])
    stream = client.generate(REQUEST)
    assert list(stream) == [_started(3), _chunk(97), FINISHED]
    assert (scripted.num_calls, stream.num_attempts) == (3, 3)
    assert (stream.token_ids, stream.text) == ([97], "a!")


def test_an_interrupted_answer_is_resumed_as_one_stream(scripted, client):
    """Each call says what the client has, and the caller sees one Started."""
    asked = []
    stopping = errors.Unavailable("gone", reason="SHUTTING_DOWN")
    begun = pb.Started(seed=5, policy="relaxed", router_version=3, prompt_digest="p", numerics_id="n")
    begun.defaults.CopyFrom(pb.GenerationDefaults(sampling=pb.Sampling(temperature=0.6, top_k=9), max_tokens=7))
    second = pb.Started(num_resumed_tokens=2, numerics_id="m", continued_inexactly=True)
    third = pb.Started(num_resumed_tokens=3, numerics_id="o")
    calls = [
        [pb.GenerateResponse(started=begun), _chunk(97), _chunk(98), stopping],
        [pb.GenerateResponse(started=second), stopping],
        [pb.GenerateResponse(started=second), _chunk(99), stopping],
        [pb.GenerateResponse(started=third), FINISHED],
    ]

    async def generate(request, context):
        asked.append(pb.GenerateRequest.FromString(request.SerializeToString()))
        for event in calls[len(asked) - 1]:
            if isinstance(event, errors.NeapError):
                raise event
            yield event

    scripted.on_generate = generate
    stream = client.generate(pb.GenerateRequest(model_id="m", model_defaults=True))
    assert list(stream) == [calls[0][0], _chunk(97), _chunk(98), _chunk(99), FINISHED]
    assert stream.text == "abc!"
    assert [list(one.resume.token_ids) for one in asked] == [[], [97, 98], [97, 98], [97, 98, 99]]
    assert [one.resume.numerics_id for one in asked] == ["", "n", "n", "m"]
    assert all(one.can_resume and one.model_id == "m" for one in asked)
    assert not asked[0].HasField("resume")
    for later in asked[1:]:
        assert (later.sampling.seed, later.router.version) == (5, 3)
        assert (later.resume.prompt_digest, later.resume.only_exactly) == ("p", False)
        # Those of the worker that began, whatever the other one's model states.
        assert not later.model_defaults
        assert (later.sampling.temperature, later.sampling.top_k, later.stopping.max_tokens) == (0.6, 9, 7)
    assert stream.resumptions == [second, third]
    assert stream.answer().resumptions == (second, third)


def test_a_resumed_answer_is_resumed_after_all_its_tokens(scripted, client):
    """The caller's own tokens come before those of the first call."""
    asked = []
    own = pb.GenerateRequest(model_id="m", resume=pb.Resume(token_ids=[1, 2]))

    async def generate(request, context):
        asked.append(list(request.resume.token_ids))
        yield pb.GenerateResponse(started=pb.Started(num_resumed_tokens=len(asked[-1])))
        if len(asked) == 2:
            yield FINISHED
            return
        yield _chunk(97)
        raise errors.Unavailable("gone")

    scripted.on_generate = generate
    assert list(client.generate(own))[1:] == [_chunk(97), FINISHED]
    assert asked == [[1, 2], [1, 2, 97]]


def test_a_worker_that_begins_anew_is_not_taken_for_one_that_resumes(scripted, client):
    gone = errors.Unavailable("gone")
    _script(scripted, [_started(1), _chunk(97), gone], *[[_started(1), _chunk(98), FINISHED]] * 2)
    stream = client.generate(REQUEST)
    with raises(errors.Unavailable, "CANNOT_RESUME"):
        list(stream)
    assert (stream.token_ids, stream.text) == ([97], "a")


@pytest.mark.parametrize(
    "error",
    [errors.Exhausted("full", retry_after_s=0.0), errors.NeapError("no"), errors.DeadlineExceeded("")],
    ids=lambda error: type(error).__name__,
)
def test_an_answer_whose_request_has_failed_is_not_resumed(scripted, client, error):
    _script(scripted, [_started(1), _chunk(97), error])
    stream = client.generate(REQUEST)
    with pytest.raises(type(error)):
        list(stream)
    assert (stream.token_ids, scripted.num_calls) == ([97], 1)


@pytest.mark.parametrize(("resumes", "num_calls"), [("never", 1), ("exactly", 2)])
def test_a_client_may_do_without_other_tokens(scripted, server, make_client, resumes, num_calls):
    """The worker refuses what would go on inexactly, and that ends the stream."""
    asked = []

    async def generate(request, context):
        asked.append(request)
        if request.resume.only_exactly:
            raise errors.PreconditionFailed("other numerics", reason="NUMERICS_DIFFER")
        yield _started(1)
        yield _chunk(97)
        raise errors.Unavailable("gone")

    scripted.on_generate = generate
    with (
        make_client(server.target, resumes=resumes) as client,
        raises(errors.NeapError, "UNAVAILABLE" if resumes == "never" else "NUMERICS_DIFFER"),
    ):
        list(client.generate(REQUEST))
    assert len(asked) == num_calls
    assert asked[0].can_resume == (resumes != "never")


@pytest.mark.parametrize("is_whole", [True, False], ids=["resumed", "not begun"])
def test_an_answer_that_is_not_resumed_before_its_deadline_ends_by_it(scripted, client, is_whole):
    """One that has not begun ends with what is in its way."""
    full = errors.Exhausted("full", reason="QUEUE_FULL", retry_after_s=3600)
    begun = [_started(1), _chunk(97), errors.Unavailable("gone")]
    _script(scripted, *([begun, [full]] if is_whole else [[full]]))
    stream = client.generate(REQUEST, timeout_s=1800)
    with pytest.raises(errors.DeadlineExceeded if is_whole else errors.Exhausted) as caught:
        list(stream)
    assert "full" in caught.value.message
    assert (caught.value.reason, stream.token_ids) == (("DEADLINE_EXCEEDED", [97]) if is_whole else ("QUEUE_FULL", []))


def test_closing_ends_the_wait_before_an_answer_is_resumed(scripted, client):
    _script(
        scripted,
        [_started(1), _chunk(97), errors.Unavailable("gone")],
        *[[errors.Exhausted("full", retry_after_s=3600)]] * 2,
    )
    stream = client.generate(REQUEST)
    threading.Timer(0.5, stream.close).start()
    with pytest.raises(errors.Cancelled):
        list(stream)
    assert stream.token_ids == [97]


def test_an_answer_without_a_token_is_complete(scripted, client):
    _script(scripted, [_started(1), FINISHED])
    assert list(client.generate(REQUEST)) == [_started(1), FINISHED]


@pytest.mark.parametrize("resumes", ["always", "never"])
def test_an_answer_whose_connection_is_lost_after_its_end_is_whole(scripted, server, make_client, resumes):
    _script(scripted, [_started(1), _chunk(97), FINISHED, errors.Unavailable("gone")])
    with make_client(server.target, num_attempts=3, resumes=resumes) as client:
        assert client.answer(REQUEST).text == "a!"
    assert scripted.num_calls == 1


def test_a_stream_that_ends_after_started_is_passed_on(scripted, client):
    _script(scripted, [_started(1)])
    assert list(client.generate(REQUEST)) == [_started(1)]
    assert scripted.num_calls == 1


def test_attempts_are_bounded_and_the_last_error_is_raised(scripted, client):
    _script(scripted, *[[errors.Unavailable(f"gone {number}")] for number in range(3)])
    stream = client.generate(REQUEST)
    with pytest.raises(errors.Unavailable, match="gone 2"):
        next(stream)
    assert scripted.num_calls == 3


def test_a_call_to_a_full_service_is_repeated_after_its_retry_delay(scripted, client):
    full = errors.Exhausted("full", retry_after_s=0.3)
    _script(scripted, [full], [_started(2), _chunk(97), FINISHED])
    started_s = time.monotonic()
    assert len(list(client.generate(REQUEST))) == 3
    assert time.monotonic() - started_s >= 0.3
    assert scripted.num_calls == 2


@pytest.mark.parametrize(
    "error",
    [
        errors.Exhausted("the budget is too small"),
        errors.InvalidInput("no"),
        errors.DeadlineExceeded("late"),
        errors.PreconditionFailed("no router"),
        errors.NeapError("internal"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_calls_are_not_repeated_if_that_cannot_help(scripted, client, error):
    _script(scripted, [error])
    with pytest.raises(type(error)):
        list(client.generate(REQUEST))
    assert scripted.num_calls == 1


def test_the_deadline_is_one_for_all_attempts(scripted, client):
    left_s = []

    async def generate(request, context):
        left_s.append(context.time_remaining())
        if scripted.num_calls == 1:
            raise errors.Exhausted("full", retry_after_s=0.5)
        yield FINISHED

    scripted.on_generate = generate
    list(client.generate(REQUEST, timeout_s=10))
    # Deadlines are rounded up on the wire.
    assert 0 < left_s[0] < 10.5
    assert left_s[1] <= left_s[0] - 0.3


def test_a_wait_beyond_the_deadline_is_not_begun(scripted, client):
    _script(scripted, [errors.Exhausted("full", retry_after_s=3600)])
    with pytest.raises(errors.Exhausted):
        list(client.generate(REQUEST, timeout_s=1800))
    assert scripted.num_calls == 1


def test_closing_ends_a_wait_and_a_running_call(scripted, client):
    _script(scripted, [errors.Exhausted("full", retry_after_s=3600)])
    stream = client.generate(REQUEST)
    threading.Timer(0.3, stream.close).start()
    with pytest.raises(errors.Cancelled):
        list(stream)
    assert scripted.num_calls == 1

    ended = threading.Event()

    async def endless(request, context):
        try:
            while True:
                yield _chunk(97)
        finally:
            ended.set()

    scripted.on_generate = endless
    with client.generate(REQUEST) as running:
        next(running)
    assert ended.wait(60)
    assert list(running) == []


def test_the_next_address_takes_over(scripted, server, make_client):
    _script(scripted, [_chunk(97), FINISHED])
    port = server.target.rpartition(":")[2]
    with make_client(f"ipv4:127.0.0.1:1,127.0.0.1:{port}", num_attempts=1) as client:
        assert list(client.generate(REQUEST)) == [_chunk(97), FINISHED]


def test_an_answer_whose_worker_hangs_goes_on_elsewhere(scripted, server, make_client):
    """The wait for the first token may be long, also at the worker that resumes it: the call may stand in a queue."""
    asked = []

    async def generate(request, context):
        asked.append(list(request.resume.token_ids))
        yield pb.GenerateResponse(started=pb.Started(num_resumed_tokens=len(asked[-1])))
        await asyncio.sleep(2.0)  # longer than the bound
        yield _chunk(97)
        if len(asked) == 1:
            await asyncio.Event().wait()
        yield FINISHED

    scripted.on_generate = generate
    with make_client(server.target, num_attempts=3, stall_timeout_s=1.5) as client:
        stream = client.generate(REQUEST)
        assert [event.chunk.text for event in stream] == ["", "a", "a", ""]
    assert asked == [[], [97]]


def test_a_worker_that_hangs_before_it_resumes_is_passed_over(scripted, server, make_client):
    num_hung = 0

    async def generate(request, context):
        nonlocal num_hung
        if request.resume.token_ids and not num_hung:
            num_hung += 1
            await asyncio.Event().wait()
        yield pb.GenerateResponse(started=pb.Started(num_resumed_tokens=len(request.resume.token_ids)))
        yield _chunk(97)
        if not num_hung:
            raise errors.Unavailable("gone")
        yield FINISHED

    scripted.on_generate = generate
    with make_client(server.target, num_attempts=3, stall_timeout_s=1.5) as client:
        assert [event.chunk.text for event in client.generate(REQUEST)] == ["", "a", "a", ""]
    assert (scripted.num_calls, num_hung) == (3, 1)


@pytest.mark.parametrize("options", [{"resumes": "never"}, {"num_attempts": 1}])
def test_what_is_not_resumed_may_take_its_time(scripted, server, make_client, options):
    async def generate(request, context):
        yield _started(1)
        yield _chunk(97)
        await asyncio.sleep(1.0)
        yield FINISHED

    scripted.on_generate = generate
    with make_client(server.target, stall_timeout_s=0.1, **options) as client:
        assert [event.chunk.text for event in client.generate(REQUEST)] == ["", "a", ""]


def test_an_answer_that_has_begun_waits_for_room(scripted, server, make_client):
    full = errors.Exhausted("full", reason="QUEUE_FULL", retry_after_s=0.01)
    again = pb.GenerateResponse(started=pb.Started(num_resumed_tokens=1))
    calls = [[_started(1), _chunk(97), errors.Unavailable("gone")], [full], [again, FINISHED]]
    _script(scripted, *calls)
    with make_client(server.target, num_attempts=3, waits_when_full=False) as client:
        assert [event.chunk.text for event in client.generate(REQUEST)] == ["", "a", ""]


def test_pieces_of_a_call_that_another_stream_began_are_kept(scripted, client):
    """A program may keep an answer's state and resume it itself, within a call of a tool."""
    pieces = [pb.ToolCallChunk(index=1, arguments="1}"), pb.ToolCallChunk(index=2, id="i", name="n", arguments="{}")]
    chunk = pb.GenerateResponse(chunk=pb.TokenChunk(tokens=[pb.Token(id=65)], tool_calls=pieces))
    _script(scripted, [_started(1), chunk, FINISHED])
    calls = client.answer(REQUEST).tool_calls
    assert [(call.id, call.name, call.arguments) for call in calls] == [("", "", ""), ("", "", "1}"), ("i", "n", "{}")]
