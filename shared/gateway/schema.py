"""The request bodies of the API. A field that is not here is refused, and so is a value that the engine cannot honour."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.gateway.errors import refused

UINT32 = 2**32 - 1
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

Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=UINT32)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DepthOptions(Strict):
    """The `neap` object of a request: depth policy and router."""

    policy: Literal["full", "exact", "relaxed"] | None = None
    threshold: float | None = Field(default=None, gt=0, le=1)
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
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class GenerationFields(Strict):
    """The fields that both endpoints have. The last five are not OpenAI's; vLLM has the same ones under the same names."""

    model: str = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, le=UINT32)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**64 - 1)
    stop: Stop | list[Stop] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    neap: DepthOptions | None = None
    top_k: int | None = Field(default=None, ge=1, le=UINT32)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None


class ChatRequest(GenerationFields):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=UINT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class CompletionRequest(GenerationFields):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(min_length=1)
    logprobs: int | None = Field(default=None, ge=0, le=20)


def without_neutral(
    fields: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], path: str = ""
) -> dict[str, Any]:
    """Return `fields` without those that ask for nothing. Raises InvalidInput (UNSUPPORTED_FIELD) for those that ask for something."""
    kept = {}
    for name, value in fields.items():
        if name not in neutral:
            kept[name] = value
        elif value is not None and not any(_same(value, allowed) for allowed in neutral[name]):
            raise refused(
                f"{path}{name} is not supported here with this value; leave it out",
                f"{path}{name}",
                reason="UNSUPPORTED_FIELD",
            )
    return kept


def _same(value: Any, allowed: Any) -> bool:
    """Whether both are equal. Unlike in Python, false is not 0."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)
