"""Answers that one worker begins and another one goes on with, as clients see them."""

import threading

import grpc
import pytest
from neap_client import NeapClient
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.inference.v1 import inference_pb2_grpc

from shared.engine.engine import Engine
from shared.engine.request.answer import Detokenizer
from shared.model.loaded import wrap_model
from shared.registry.factory import open_registry
from tests.generation import EXACT, FULL, answer, publish, refused, request_of
from tests.waiting import wait_until
from tests.worker import build_model, build_tokenizer, serving

NUM_NEW = 40
SAMPLED = pb.Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.1, seed=8)


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Two workers with the same model in memory of their own, and the same registry."""
    registry = open_registry(str(tmp_path_factory.mktemp("registry")))
    models = [wrap_model(build_model(), build_tokenizer(), model_id="tiny", accelerate=True) for _ in range(2)]
    with (
        Engine(models[0]) as first,
        Engine(models[1]) as second,
        serving(first, registry) as one,
        serving(second, registry) as other,
    ):
        publish(registry, first)
        yield one, other
    registry.close()


@pytest.fixture
def stubs(workers):
    with grpc.insecure_channel(workers[0].target) as one, grpc.insecure_channel(workers[1].target) as other:
        yield [inference_pb2_grpc.InferenceServiceStub(channel) for channel in (one, other)]


def resumed(request, started, tokens, **changes):
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.sampling.seed = started.seed
    fields = {"prompt_digest": started.prompt_digest, "numerics_id": started.numerics_id}
    again.resume.CopyFrom(pb.Resume(token_ids=[t.id for t in tokens], **{**fields, **changes}))
    return again


def text_of_each(loaded, tokens):
    """The text that each token completes."""
    detokenizer = Detokenizer(loaded.tokenizer)
    return [detokenizer.push(token.id) for token in tokens]


@pytest.mark.parametrize("depths", [(FULL, EXACT), (EXACT, FULL), (EXACT, EXACT)])
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_the_rest_of_an_answer_is_that_of_an_uninterrupted_run(stubs, workers, depths, sampling):
    """Tokens, text, the end and the counts.
    Characters of several bytes cross the seam: most bytes are no whole one."""
    one, other = stubs
    request = request_of(NUM_NEW, depth=depths[0], sampling=sampling, logprobs=2)
    started, tokens, texts, finished = answer(one, request)
    each = text_of_each(workers[0].engine.loaded, tokens)
    assert "".join(texts) == "".join(each)
    request.depth.CopyFrom(depths[1])
    for cut in (1, 7, 8, 9, NUM_NEW - 1, NUM_NEW):
        again = resumed(request, started, tokens[:cut])
        later, rest, rest_texts, end = answer(other, again)
        assert [t.id for t in rest] == [t.id for t in tokens[cut:]]
        assert [t.logprob for t in rest] == [t.logprob for t in tokens[cut:]]
        assert "".join(rest_texts) == "".join(each[cut:])
        assert (end.reason, end.stop_match, end.text) == (finished.reason, finished.stop_match, finished.text)
        assert end.usage.num_completion_tokens == NUM_NEW
        assert end.usage.num_prompt_tokens == finished.usage.num_prompt_tokens
        assert (later.num_resumed_tokens, later.continued_inexactly) == (cut, False)
        assert later.prompt_digest == started.prompt_digest


def test_scores_of_a_prompt_go_on_where_they_ended(stubs):
    one, other = stubs
    request = request_of(4, token_ids=pb.TokenIds(ids=[own % 250 for own in range(600)]), prompt_logprobs=1)
    started, *events = one.Generate(request, timeout=60)
    pieces = [event.chunk.prompt_tokens for event in events if event.chunk.prompt_tokens]
    whole = [token for piece in pieces for token in piece]
    assert len(pieces) > 1
    assert [token.id for token in whole] == request.token_ids.ids
    assert [token.HasField("logprob") for token in whole] == [False] + [True] * 599
    for cut in (1, len(pieces[0]), 600):
        again = resumed(request, started.started, [], num_prompt_tokens=cut)
        rest = [token for event in other.Generate(again, timeout=60) for token in event.chunk.prompt_tokens]
        assert rest == whole[cut:]
    _, tokens, _, _ = answer(one, request)
    later = [event.chunk for event in other.Generate(resumed(request, started.started, tokens[:1]), timeout=60)]
    assert not any(chunk.prompt_tokens for chunk in later)
    assert [token.id for chunk in later for token in chunk.tokens] == [t.id for t in tokens[1:]]


def test_a_stop_string_is_found_across_the_seam(stubs, workers):
    one, other = stubs
    request = request_of(NUM_NEW, sampling=SAMPLED)
    started, tokens, texts, _ = answer(one, request)
    each = text_of_each(workers[0].engine.loaded, tokens)
    seam = len("".join(each[:20]))
    request.stopping.stop_strings.append("".join(texts)[seam - 2 : seam + 2])
    _, whole, whole_texts, finished = answer(one, request)
    assert finished.reason == pb.FINISH_REASON_STOP_STRING
    for cut in range(len(whole) - 4, len(whole) + 1):
        _, rest, rest_texts, end = answer(other, resumed(request, started, tokens[:cut]))
        assert len(rest) == len(whole) - cut
        # What may begin the stop string is held back: of whoever has it in the end, it is no text.
        assert "".join(whole_texts).endswith("".join(rest_texts))
        assert (end.reason, end.stop_match) == (finished.reason, finished.stop_match)


def test_what_may_differ_is_said_and_can_be_refused(stubs):
    one, other = stubs
    request = request_of(NUM_NEW)
    started, tokens, _, _ = answer(one, request)
    for changed in (resumed(request, started, tokens[:5], numerics_id=n) for n in ("", "another")):
        assert answer(other, changed)[0].continued_inexactly
        changed.resume.only_exactly = True
        code, info, message = refused(other, changed)
        assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NUMERICS_DIFFER")
        assert started.numerics_id in message
    relaxed = request_of(NUM_NEW, depth=pb.DepthPolicy(relaxed=pb.Relaxed(threshold=0.9)), router=None)
    assert answer(other, resumed(relaxed, started, tokens[:5]))[0].continued_inexactly
    nothing = resumed(request, started, [], numerics_id="another", only_exactly=True)
    assert not answer(other, nothing)[0].continued_inexactly


def test_a_stopping_worker_hands_over_only_answers_that_go_on_elsewhere(workers, tmp_path):
    """The caller of one sees nothing of it; the other one is finished where it began."""
    registry = open_registry(str(tmp_path))
    loaded = wrap_model(build_model(), build_tokenizer(), model_id="tiny", accelerate=True)
    request = request_of(1500)
    with (
        Engine(loaded) as engine,
        serving(engine, registry) as stopping,
        NeapClient(f"ipv4:{stopping.target},{workers[1].target}", num_attempts=9, has_affinity=False) as client,
        NeapClient(stopping.target, resumes="never") as bound,
    ):
        # From then on calls are shared in turn.
        wait_until(lambda: list(client.generate(request_of(1))) and engine.statistics.num_requests)
        streams = [client.generate(request) for _ in range(4)]
        stays = bound.generate(request)
        for stream in (*streams, stays):
            while len(stream.token_ids) < 3:
                next(stream)
        began_here = engine.num_running - 1
        assert began_here > 0
        stopping.loop.call_soon_threadsafe(stopping.servicer.hand_over)
        wait_until(lambda: engine.num_running == 1)
        threads = [threading.Thread(target=list, args=(stream,)) for stream in (*streams, stays)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len({tuple(stream.token_ids) for stream in (*streams, stays)}) == 1
        assert len({stream.text for stream in (*streams, stays)}) == 1
        assert sum(len(stream.resumptions) for stream in streams) >= began_here
        assert stays.num_attempts == 1
        assert not any(s.continued_inexactly for stream in streams for s in stream.resumptions)
    registry.close()


def test_a_call_that_is_prepared_while_the_worker_begins_to_stop_is_handed_over(tmp_path, monkeypatch):
    """Nothing of it may be left to wait for."""
    registry = open_registry(str(tmp_path))
    loaded = wrap_model(build_model(), build_tokenizer(), model_id="tiny", accelerate=True)
    with Engine(loaded) as engine, serving(engine, registry) as stopping:
        publish(registry, engine)
        own = stopping.store.select

        async def select(*args, **options):
            stopping.servicer.hand_over()
            return await own(*args, **options)

        monkeypatch.setattr(stopping.store, "select", select)
        request = request_of(5, depth=EXACT)
        with grpc.insecure_channel(stopping.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            assert answer(stub, request)[3].usage.num_completion_tokens == 5
            stopping.servicer._hands_over = False
            request.can_resume = True
            code, info, _ = refused(stub, request)
        assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "HANDED_OVER")
        assert engine.num_running == 0
    registry.close()
