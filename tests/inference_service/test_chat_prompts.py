"""What chats become as prompts, by every way of writing calls."""

import pytest
from neap_client.inference.v1 import inference_pb2 as pb

from inference_service.chat import PreparedChat
from shared.chat.formats import call_format
from shared.engine.request.prompt import encode_prompt
from tests.chats import CHANNELS, WAYS, build_chat_model
from tests.tiers import tiered

TOOLS = [pb.Tool(name="add", description="d")]
USER = [pb.ChatMessage(role="user", content="hello")]


@pytest.fixture(scope="module", params=tiered(WAYS, {"hermes", "in thought", "channels"}))
def loaded(request):
    return build_chat_model(WAYS[request.param], own_tokens=True)


def test_what_was_thought_and_said_before_a_call_is_in_the_prompt(loaded):
    call = pb.ToolCall(id="abcdefgh1", name="add", arguments='{"a": 1}')
    said = pb.ChatMessage(role="assistant", content="I add.", reasoning="One and 11.", tool_calls=[call])
    prompt = PreparedChat(pb.Chat(messages=[*USER, said, *USER], tools=TOOLS), loaded).prompt
    text = loaded.tokenizer.decode(encode_prompt(loaded, prompt))
    if loaded.tokenizer.chat_template == CHANNELS:
        assert "<|channel|>analysis<|message|>One and 11.\n\nI add.<|end|>" in text
    else:
        assert prompt.messages[1]["reasoning_content"] == "One and 11."
        assert "thinking" not in prompt.messages[1]
    only_said = PreparedChat(pb.Chat(messages=[pb.ChatMessage(role="assistant", content="So", reasoning="R")]), loaded)
    assert only_said.prompt.messages[0]["content"] == "So"


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("", {}),
        (" \n", {}),
        ("null", {}),
        ("{", {}),
        ('{"a": "é😀', {"a": "é😀"}),
        ('{"a": [1, {"b": "\\', {"a": [1, {"b": ""}]}),
    ],
)
def test_arguments_that_the_end_of_an_answer_cut_are_a_prompt(loaded, arguments, read):
    call = pb.ToolCall(id="abcdefgh1", name="add", arguments=arguments)
    chat = pb.Chat(messages=[*USER, pb.ChatMessage(role="assistant", tool_calls=[call]), *USER], tools=TOOLS)
    [told] = PreparedChat(chat, loaded).prompt.messages[1]["tool_calls"]
    takes_text = call_format(loaded).takes_text
    assert told["function"]["arguments"] == ((arguments or "{}") if takes_text else read)
    assert encode_prompt(loaded, PreparedChat(chat, loaded).prompt)
