"""`neap chat` against a scripted worker. Input that is no terminal has no prompt."""

import os
import signal
import threading

import pytest

from neap_engine.cli.chat import Conversation
from shared.errors import InvalidInput


def contents(conversation, question):
    return [(one.role, one.content) for one in conversation.messages(question)]


def test_the_oldest_turns_give_way_and_the_system_message_stays():
    conversation = Conversation(context_length=100, answer_tokens=30, system="be brief")
    conversation.add("a", "b", 20)
    conversation.add("c", "d", 35)
    conversation.add("e", "f", 60)
    assert conversation.make_room("x" * 20) == 0  # 60 + 10 + 30
    assert conversation.make_room("x" * 22) == 1
    assert conversation.num_tokens == 40
    said = [("system", "be brief"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    assert contents(conversation, "g") == [*said, ("assistant", "f"), ("user", "g")]
    assert conversation.make_room("x" * 1000) == 2
    assert contents(conversation, "g") == [("system", "be brief"), ("user", "g")]
    assert conversation.num_tokens == 0


def test_clear_keeps_the_system_message():
    conversation = Conversation(100, 30, "be brief")
    conversation.add("a", "b", 90)
    conversation.clear()
    assert conversation.make_room("c") == 0
    assert contents(conversation, "c") == [("system", "be brief"), ("user", "c")]


@pytest.fixture
def chat(service, neap):
    def run(*lines, flags=(), **options):
        text = "".join(f"{line}\n" for line in lines)
        return neap("chat", "--worker", service.address, *flags, input=text, **options)

    return run


def said(request):
    return [(message.role, message.content) for message in request.chat.messages]


def test_every_turn_carries_those_before(service, chat):
    result = chat("hi", "", "and then?", "/exit", "not asked")
    assert result.stdout == "Héllo there\nHéllo there\n"
    first, second = map(said, service.inference.requests)
    assert first == [("user", "hi")]
    assert second == [*first, ("assistant", "Héllo there"), ("user", "and then?")]
    assert "tokens/s" not in result.stderr


def test_clear_begins_a_new_conversation_and_other_commands_are_not_sent(service, chat):
    result = chat("hi", "/clear", "/what", "again", flags=["--system", "be brief"])
    assert said(service.inference.requests[-1]) == [("system", "be brief"), ("user", "again")]
    assert len(service.inference.requests) == 2
    assert "/clear begins a new one" in result.stderr


def test_flags_of_a_request_apply_to_every_turn(service, chat):
    flags = ["--policy", "full", "--temperature", "0.5", "--max-tokens", "9", "--show-depth"]
    result = chat("hi", "again", flags=flags)
    for request in service.inference.requests:
        assert request.depth.WhichOneof("policy") == "full"
        assert (request.sampling.temperature, request.stopping.max_tokens) == (0.5, 9)
    assert result.stderr.count("tokens/s") == 2


@pytest.mark.parametrize("reason", ["PROMPT_TOO_LONG", "MAX_TOKENS_TOO_LARGE"])
def test_what_the_context_has_no_room_for_is_forgotten(service, chat, reason):
    def refuse_more_than_a_turn(request):
        if len(request.chat.messages) > 3:
            raise InvalidInput("too long", reason=reason)

    service.inference.on_generate = refuse_more_than_a_turn
    result = chat("a", "b", "c")
    assert [text for _, text in said(service.inference.requests[-1])] == ["b", "Héllo there", "c"]
    assert result.stderr.count("the context is full") == 1


def test_a_question_that_is_too_long_alone_is_an_error(service, chat):
    def refuse(request):
        raise InvalidInput("too long", reason="PROMPT_TOO_LONG")

    service.inference.on_generate = refuse
    result = chat("a", code=1)
    assert "PROMPT_TOO_LONG" in result.stderr


def test_ctrl_c_ends_the_answer_and_not_the_conversation(service, chat):
    second = threading.Event()

    def interrupt(request):
        if request.chat.messages[-1].content == "b":
            second.set()
        else:
            os.kill(os.getpid(), signal.SIGINT)
            assert second.wait(60)

    service.inference.on_generate = interrupt
    result = chat("a", "b")
    # The first question had no answer, so it is not part of the conversation.
    assert said(service.inference.requests[-1]) == [("user", "b")]
    assert result.stdout.endswith("Héllo there\n")


def test_in_a_terminal_an_error_does_not_end_the_conversation(service, chat, monkeypatch):
    def refuse_once(request):
        service.inference.on_generate = lambda request: None
        raise InvalidInput("no", reason="MARGIN_NEEDS_GREEDY")

    service.inference.on_generate = refuse_once
    monkeypatch.setattr("neap_engine.cli.chat.is_terminal", lambda: True)
    result = chat("a", "b")
    assert "error: no [MARGIN_NEEDS_GREEDY]" in result.stderr
    assert "Héllo there" in result.stdout
    assert said(service.inference.requests[-1]) == [("user", "b")]
