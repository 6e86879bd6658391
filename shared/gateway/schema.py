"""The request bodies of the API. A field that is not here is refused, and so is a value that the engine cannot honour."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

UINT32 = 2**32 - 1
# Above what the settings allow.
MAX_CHOICES = 128
# Values that ask for nothing, of fields of OpenAI's API that the engine does not have. None is always such a value.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
# The same for the fields of a message. Clients send back the messages that they got, with all their fields.
NEUTRAL_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}

T = TypeVar("T")
# Only the first wrong item is reported: errors of a million items would take gigabytes.
Items = Annotated[list[T], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=UINT32)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        """Drop fields in `unsupported` that ask for nothing. Raises PydanticCustomError (unsupported_field) if one asks for something."""
        if not isinstance(fields, dict):
            return fields
        kept = {}
        for name, value in fields.items():
            if name not in cls.unsupported:
                kept[name] = value
            elif value is not None and not any(_same(value, ok) for ok in cls.unsupported[name]):
                raise PydanticCustomError("unsupported_field", "{field}", {"field": name})
        return kept


class DepthOptions(Strict):
    """The `neap` object of a request: depth policy and router."""

    policy: Literal["full", "exact", "relaxed"] | None = None
    threshold: float | None = Field(default=None, gt=0, le=1)
    margin: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_drafts: int | None = Field(default=None, ge=0, le=UINT32)
    min_layers: int | None = Field(default=None, ge=0, le=UINT32)
    router_version: int | None = Field(default=None, ge=1, le=2**63 - 1)
    router_alias: str | None = Field(default=None, min_length=1, max_length=64)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    unsupported = NEUTRAL_IN_MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart]


class GenerationFields(Strict):
    """The fields that both endpoints have. The last five are not OpenAI's; vLLM has the same ones under the same names."""

    unsupported = NEUTRAL

    model: str = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=UINT32)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**64 - 1)
    stop: Stop | Items[Stop] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    neap: DepthOptions | None = None
    top_k: int | None = Field(default=None, ge=1, le=UINT32)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    stop_token_ids: Items[TokenId] | None = None
    ignore_eos: bool | None = None


class ChatRequest(GenerationFields):
    """The body of /v1/chat/completions."""

    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=UINT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class CompletionRequest(GenerationFields):
    """The body of /v1/completions."""

    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]] = Field(min_length=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)


def _same(value: Any, allowed: Any) -> bool:
    """Whether both are equal. Unlike in Python, false is not 0."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)
