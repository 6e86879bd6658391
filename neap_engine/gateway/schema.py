"""The request bodies of the API. A field that is not here is refused, and so is a value that the engine cannot
honour."""

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar, get_args

from neap_client.fields import FIELDS
from neap_client.requests import DEPTH
from neap_client.rules import Field as Rule
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

UINT32 = 2**32 - 1
# Above what the settings allow.
MAX_CHOICES = 128
# Above what workers allow.
MAX_STOPS = 1024
# Values that ask for nothing of the engine, of fields of OpenAI's API, and of vLLM's, that it does not have: a value,
# or a type if all its values do. None is always such a value.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "metadata": (dict,),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_cache_key": (str,),
    "prompt_cache_options": (dict,),
    "prompt_cache_retention": (str,),
    "service_tier": ("auto", "default", "flex"),
    "skip_special_tokens": (True,),
    "store": (bool,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": (str,),
    "web_search_options": (),
}
# The same for the fields of a message. Clients send back the messages that they got, with all their fields.
NEUTRAL_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "annotations": (list,),
    "audio": (),
    "function_call": (),
    "name": (str,),
    "refusal": (),
}
# What refers to something that a server has stored.
STORED = {"background", "conversation", "id", "previous_response_id", "prompt"}

_DIGITS = re.compile(r"-?[0-9]{1,20}")
T = TypeVar("T")
# Only the first wrong item is reported: errors of a million items would take gigabytes.
Items = Annotated[list[T], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=UINT32)]


def _number(value: Any) -> Any:
    """Turn a seed in decimal digits into a number.
    Responses have it so, because JavaScript's numbers are not exact above 2**53."""
    return int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value


def _unless_off(value: Any) -> Any:
    """vLLM's clients send -1 or 0 to keep all tokens."""
    return None if type(value) is int and value in (-1, 0) else value


Seed = Annotated[int, BeforeValidator(_number), Field(ge=-(2**63), le=2**64 - 1)]
# In JSON all keys are texts.
BiasedToken = Annotated[int, BeforeValidator(_number), Field(ge=0, le=UINT32)]
TopK = Annotated[Annotated[int, Field(ge=1, le=UINT32)] | None, BeforeValidator(_unless_off)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, fields: Any) -> Any:
        """Drop fields in `unsupported` that ask for nothing.
        Raises PydanticCustomError (unsupported_field) if one asks for something."""
        if not isinstance(fields, dict):
            return fields
        neutral = [name for name in fields if name in cls.unsupported]
        for name in neutral:
            value = fields[name]
            if value is not None and not any(_same(value, ok) for ok in cls.unsupported[name]):
                raise PydanticCustomError("unsupported_field", "{field}", {"field": name})
        return {name: value for name, value in fields.items() if name not in neutral} if neutral else fields


def _member(rule: Rule) -> tuple[Any, None]:
    """A member of a body, within the limits of a field of the protos."""
    largest = UINT32 if rule.kind == "uint32" else None
    bounds = {"ge": rule.least, "gt": rule.above, "le": largest if rule.most is None else rule.most}
    limits: dict[str, Any] = {name: rule.python_type(bound) for name, bound in bounds.items() if bound is not None}
    kind: Any = Annotated[rule.python_type, Field(**limits)]
    if rule.kind == "message":  # a word has no token ids in JSON
        kind = Stop
    if rule.is_map:
        kind = dict[BiasedToken, kind]
    elif rule.is_list:
        kind = Annotated[Items[kind], Field(max_length=rule.most_items)]
    return kind | None, None


def _members(*messages: str, but: set[str]) -> Any:
    """A class with a member for each field of these messages of neap.inference.v1, except for some."""
    rules = (rule for message in messages for rule in FIELDS[message].values() if rule.name not in but)
    members: dict[str, Any] = {rule.name: _member(rule) for rule in rules}
    return create_model("Members", __base__=Strict, **members)


if TYPE_CHECKING:
    DepthMembers: TypeAlias = Strict
    SamplingMembers: TypeAlias = Strict
else:
    # A body says in other ways which log-probabilities it wants; the gateway's settings, what a model states.
    DepthMembers = _members(*DEPTH, "GenerateRequest", but={"logprobs", "prompt_logprobs", "model_defaults"})
    # These have names or limits of OpenAI's.
    SamplingMembers = _members(
        "Sampling", "Stopping", but={"temperature", "top_p", "top_k", "seed", "max_tokens", "stop_strings"}
    )


class DepthOptions(DepthMembers):
    """The `neap` object of a request: the fields of the depth policy and of a request that are here and in the protos,
    under their names."""

    policy: Literal["full", "exact", "relaxed"] | None = None
    router_version: int | None = Field(default=None, ge=1, le=2**63 - 1)
    router_alias: str | None = Field(default=None, min_length=1, max_length=64)
    learn: Literal["never"] | None = None


class StreamOptions(Strict):
    """`include_obfuscation` has no effect. `continuous_usage_stats` is vLLM's."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class NamedSchema(Strict):
    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """`schema` of a JSON object is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class StructuredOutputs(Strict):
    """vLLM's. At most one of its fields is set. `grammar` is llguidance's variant of Lark."""

    unsupported = {
        "backend": (str,),
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (bool,),
        "disable_fallback": (bool,),
        "structural_tag": (),
        "whitespace_pattern": (),
    }

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Returned(Strict):
    """What clients send back of answers, also of other servers': fields that are not known have no effect."""

    model_config = ConfigDict(extra="ignore")


class TextPart(Returned):
    type: Literal["text"]
    text: str


class Prediction(Strict):
    type: Literal["content"]
    content: str | Items[TextPart]


class CalledFunction(Returned):
    """Some clients send arguments as the object that they are, or leave out empty ones."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Returned):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Returned):
    """Only messages of assistants, and results without text, may have no content."""

    unsupported = NEUTRAL_IN_MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Items[NamedTool] = Field(min_length=1)


class AllowedToolsChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class SamplingFields(SamplingMembers):
    """The fields that all endpoints have: these, and those of Sampling and Stopping in the protos under their names,
    which vLLM has, too."""

    unsupported = NEUTRAL

    model: str = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)
    seed: Seed | None = None
    stop: Stop | Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    user: str | None = Field(default=None, max_length=512)
    safety_identifier: str | None = Field(default=None, max_length=512)
    prediction: Prediction | None = None
    neap: DepthOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    top_k: TopK = None


class GenerationFields(SamplingFields):
    """The fields that chats and completions have."""

    max_tokens: int | None = Field(default=None, ge=1, le=UINT32)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None


class TemplateFields(Strict):
    """How a chat becomes a prompt: OpenAI's field, and vLLM's. `add_generation_prompt` is the opposite of the last
    one."""

    reasoning_effort: str | None = Field(default=None, max_length=64)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _begins_a_message_or_continues_one(self) -> Self:
        if self.add_generation_prompt is bool(self.continue_final_message):
            raise PydanticCustomError("unsupported_field", "{field}", {"field": "add_generation_prompt"})
        return self


class ChatRequest(GenerationFields, TemplateFields):
    """The body of /v1/chat/completions."""

    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=UINT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationFields):
    """The body of /v1/completions."""

    unsupported = NEUTRAL | {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "reasoning_effort": (str,),
    }

    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=0, le=UINT32)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None


def _models(annotation: Any) -> Iterator[type[Strict]]:
    """The models in the type of a field."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


@cache
def members() -> frozenset[str]:
    """What pydantic's locations call the members of unions."""

    def names(kind: type[BaseModel]) -> Iterator[str]:
        yield kind.__name__
        for below in kind.__subclasses__():
            yield from names(below)

    return frozenset({"str", "int", "float", "bool", *names(Strict)})


def suggestion(kind: type[BaseModel], location: tuple[int | str, ...]) -> str | None:
    """Return the field that was meant by an unknown one at `location` in a body of `kind`: one with a similar name, or
    of `neap`."""
    *parents, name = (part for part in location if isinstance(part, str))
    models: list[type[BaseModel]] = [kind]
    for part in parents:
        nested: list[type[BaseModel]] = [
            inner
            for model in models
            for field_name, field in model.model_fields.items()
            if part in (field_name, field.alias)
            for inner in _models(field.annotation)
        ]
        # A member of a union has its own part.
        models = nested or [model for model in models if model.__name__ == part] or models
    if models == [kind] and name in DepthOptions.model_fields:
        return f"neap.{name}"
    names = [each for model in models for each in (*model.model_fields, *getattr(model, "unsupported", ()))]
    return next(iter(difflib.get_close_matches(name[:64], names, 1)), None)


def _same(value: Any, allowed: Any) -> bool:
    """Whether the value is of a type, or equal to a value. Unlike in Python, false is not 0."""
    if isinstance(allowed, type):
        return isinstance(value, allowed)
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)
