import pytest
from google.protobuf.message import DecodeError
from neap_client.inference.v1 import inference_pb2 as pb

from shared.errors import InvalidInput
from shared.rpc.outline import FREE_BYTES, MAX_MESSAGES, check_outline

Request = pb.GenerateRequest


def nested(count, **fields):
    """A request with so many parts in its lists."""
    parts = {
        "messages": lambda: Request(chat=pb.Chat(messages=[pb.ChatMessage()] * count)),
        "calls": lambda: Request(chat=pb.Chat(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * (count - 1))])),
        "calls_of_many": lambda: Request(
            chat=pb.Chat(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * 15)] * (count // 16))
        ),
        "biases": lambda: Request(sampling=pb.Sampling(logit_bias=dict.fromkeys(range(count), 1.0))),
    }[fields["where"]]()
    # Of a size at which requests are looked at.
    parts.model_id = "m" * FREE_BYTES
    return parts.SerializeToString()


@pytest.mark.parametrize("where", ["messages", "calls", "calls_of_many", "biases"])
def test_a_request_of_many_messages_is_refused_and_one_of_as_many_as_may_be_is_not(where):
    check_outline(Request, nested(MAX_MESSAGES, where=where))
    with pytest.raises(InvalidInput) as caught:
        check_outline(Request, nested(MAX_MESSAGES + 16, where=where))
    assert caught.value.reason == "REQUEST_TOO_COMPLEX"


def test_texts_and_numbers_are_no_messages():
    request = Request(text="x" * FREE_BYTES, stopping=pb.Stopping(stop_strings=["a"] * 2 * MAX_MESSAGES))
    request.resume.token_ids.extend(range(2 * MAX_MESSAGES))
    check_outline(Request, request.SerializeToString())


def test_what_is_no_message_is_said_as_parsing_says_it():
    with pytest.raises(DecodeError):
        check_outline(Request, b"\xff" * (FREE_BYTES + 1))
