"""Bodies and answers of the endpoints that tokenise, which are vLLM's."""

from typing import Any

from neap_client.inference.v1 import inference_pb2 as pb
from pydantic import Field

from neap_engine.gateway.body import parse_object, validated
from neap_engine.gateway.errors import refused
from neap_engine.gateway.requests import chat_of
from neap_engine.gateway.schema import Items, Message, Strict, TemplateFields, TokenId, Tool


class TokenizeBody(TemplateFields):
    """A text or a chat. Without a model: the only one."""

    model: str = ""
    prompt: str | None = None
    messages: Items[Message] | None = Field(default=None, min_length=1)
    tools: Items[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    model: str = ""
    tokens: Items[TokenId]


def tokenize_request(body: bytes) -> pb.TokenizeRequest:
    """Raises InvalidInput."""
    asked = validated(TokenizeBody, parse_object(body))
    if (asked.prompt is None) == (asked.messages is None):
        raise refused("the body must have a prompt or messages, and not both", "prompt")
    request = pb.TokenizeRequest(model_id=asked.model, with_token_texts=bool(asked.return_token_strs))
    try:
        if asked.messages is not None:
            # A template writes its special tokens itself.
            request.chat.CopyFrom(chat_of(asked.messages, asked.tools or [], asked))
        else:
            request.text = asked.prompt or ""
            request.without_special_tokens = asked.add_special_tokens is False
    except UnicodeEncodeError as error:
        raise refused("a text has half of a surrogate pair", reason="BAD_JSON") from error
    return request


def detokenize_request(body: bytes) -> pb.TokenizeRequest:
    """Raises InvalidInput."""
    asked = validated(DetokenizeBody, parse_object(body))
    return pb.TokenizeRequest(model_id=asked.model, token_ids=pb.TokenIds(ids=asked.tokens))


def tokens_object(response: pb.TokenizeResponse) -> dict[str, Any]:
    return {
        "count": len(response.token_ids),
        "max_model_len": response.context_length,
        "tokens": list(response.token_ids),
        "token_strs": list(response.token_texts) or None,
    }


def text_object(response: pb.TokenizeResponse) -> dict[str, Any]:
    return {"prompt": response.text}


def tokenizer_object(tokenizer: pb.Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer_class": tokenizer.class_name,
        **tokenizer.special_tokens,
        "chat_template": tokenizer.chat_template or None,
    }
