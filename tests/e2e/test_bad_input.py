"""What a worker answers to unusual input, through real gRPC on loopback. test_reasons.py has what it refuses."""

from itertools import pairwise

import grpc
import pytest
from neap_client.inference.v1 import inference_pb2 as pb

from tests.generation import answer, publish, refused, request_of

Code = grpc.StatusCode


# models and routers


def test_exact_drafts_without_a_router(stub):
    stopping = pb.Stopping(max_tokens=3)
    answers = [
        answer(stub, request_of(stopping=stopping, depth=depth, router=router))
        for depth, router in (
            (pb.DepthPolicy(full=pb.Full()), None),
            (pb.DepthPolicy(), None),
            (pb.DepthPolicy(exact=pb.Exact(max_drafts=4), min_layers=1), pb.RouterSelector()),
        )
    ]
    for policy, (started, tokens, _, finished) in zip(("full", "exact", "exact"), answers, strict=True):
        assert (started.policy, started.router_version, started.router_digest) == (policy, 0, "")
        assert started.proposers == ([] if policy == "full" else ["prompt-lookup"])
        assert len(tokens) == finished.usage.num_completion_tokens == 3
        assert [token.id for token in tokens] == [token.id for token in answers[0][1]]
    assert stub.GetModel(pb.GetModelRequest(model_id="tiny")).model.proposers == ["prompt-lookup"]


def test_started_names_the_resolved_router(stub, engine, registry):
    published = publish(registry, engine)
    stopping = pb.Stopping(max_tokens=40, ignore_eos=True)
    request = request_of(depth=pb.DepthPolicy(), stopping=stopping)
    started, exact_tokens, _, finished = answer(stub, request)
    assert started.router_version == published.version == 1
    assert started.router_digest == published.manifest_digest
    assert finished.depth.num_drafted > 0
    _, full_tokens, _, _ = answer(stub, request_of(stopping=stopping))
    assert [token.id for token in exact_tokens] == [token.id for token in full_tokens]
    model = stub.GetModel(pb.GetModelRequest(model_id="tiny")).model
    (router,) = model.routers
    assert (router.version, router.manifest_digest) == (1, published.manifest_digest)
    assert list(router.proposers) == ["prompt-lookup"]


# requests that can never work


def test_messages_for_a_model_without_a_chat_template(stub, engine, monkeypatch):
    monkeypatch.setattr(engine.loaded.tokenizer, "chat_template", None)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])
    code, info, message = refused(stub, request_of(chat=chat))
    assert (code, info.reason) == (Code.INVALID_ARGUMENT, "NO_CHAT_TEMPLATE")
    assert "send text or token ids" in message


# text


def _sampled(stub, seed, **stopping):
    return answer(
        stub,
        request_of(
            sampling=pb.Sampling(temperature=1.5, seed=seed),
            stopping=pb.Stopping(max_tokens=60, ignore_eos=True, **stopping),
        ),
    )


def test_a_stop_string_that_spans_two_tokens(stub):
    for seed in range(50):
        _, _, texts, finished = _sampled(stub, seed)
        whole = "".join(texts) + finished.text
        for left, right in pairwise(texts):
            stop = left[-1:] + right[:1]
            if len(stop) == 2 and stop.isascii() and stop.isprintable() and whole.count(stop) == 1:
                _, _, cut_texts, cut = _sampled(stub, seed, stop_strings=["never so", stop])
                assert cut.reason == pb.FINISH_REASON_STOP_STRING
                assert cut.stop_match == stop
                assert "".join(cut_texts) + cut.text == whole[: whole.index(stop)]
                return
    pytest.fail("no two tokens made a stop string")


def test_a_stop_string_that_never_comes_is_given_back(stub):
    _, _, texts, finished = _sampled(stub, 1)
    whole = "".join(texts) + finished.text
    stop = whole[-1] + "never"
    _, _, held_texts, held = _sampled(stub, 1, stop_strings=[stop])
    assert "".join(held_texts) + held.text == whole
    assert held.text.endswith(whole[-1])
    assert held.reason == pb.FINISH_REASON_LENGTH


def test_text_never_splits_a_character(stub, engine):
    num_characters = 0
    for seed in range(6):
        _, tokens, texts, finished = _sampled(stub, seed)
        ids = [token.id for token in tokens]
        whole = engine.loaded.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        said = "".join(texts) + finished.text
        # One that the end has cut is left out.
        assert whole.startswith(said)
        assert set(whole.removeprefix(said)) <= {"\ufffd"}
        # A character whose bytes may still come is held back, so U+FFFD never ends a chunk.
        assert not any(text.endswith("\ufffd") for text in texts)
        num_characters += sum(ord(character) > 127 and character != "\ufffd" for character in whole)
    assert num_characters > 0


def test_token_ids_that_are_broken_utf8_are_a_prompt_like_any_other(stub, engine):
    snowman = engine.loaded.tokenizer("\u2603")["input_ids"]
    assert len(snowman) == 3
    for ids in (snowman[:1], snowman[1:], snowman[::-1]):
        request = request_of(token_ids=pb.TokenIds(ids=ids), stopping=pb.Stopping(max_tokens=2))
        started, tokens, _, _ = answer(stub, request)
        assert started.num_prompt_tokens == len(ids)
        assert len(tokens) == 2
