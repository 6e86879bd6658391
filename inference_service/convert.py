"""Converts between the protos of neap.inference.v1 and the engine's dataclasses."""

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf import duration_pb2
from neap_client.fields import FIELDS
from neap_client.inference.v1 import inference_pb2

from inference_service.chat import PreparedChat
from inference_service.router_loader import LoadedRouter
from inference_service.routers import RouterChoice
from shared.chat.parser import AnswerParser, MessagePart
from shared.constraints.constraint import MAX_BYTES, Constraint, MessageConstraint, invalid
from shared.engine.memory.prefixes import key_of
from shared.engine.request.prompt import Prompt, encode_bad_word, encode_prediction, encode_prompt
from shared.engine.request.request import (
    DepthStatistics,
    Finished,
    FinishReason,
    GeneratedToken,
    GenerationEvent,
    GenerationRequest,
    StoppingParams,
)
from shared.errors import InvalidInput, PermissionDenied, PreconditionFailed, PromptTooLong
from shared.ladder.policy import DepthPolicy
from shared.model.generation_defaults import GenerationDefaults
from shared.model.loaded import LoadedModel
from shared.model.sampling import SamplingParams

NO_DEFAULTS = GenerationDefaults()
MAX_BAD_WORD_CHARACTERS = 256

_REASONS = {
    FinishReason.EOS: inference_pb2.FINISH_REASON_EOS,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.STOP_STRING: inference_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.STOP_TOKEN: inference_pb2.FINISH_REASON_STOP_TOKEN,
}


def to_generation_request(
    request: inference_pb2.GenerateRequest,
    loaded: LoadedModel,
    *,
    request_id: str,
    client: str = "",
    on_behalf_of: str = "",
    deadline_s: float = math.inf,
    least_priority: int = 0,
    chats_have_control_tokens: bool = False,
    cache_scope: str = "",
    pool: str = "",
    router: LoadedRouter | None = None,
) -> tuple[GenerationRequest, PreparedChat | None]:
    """Validates and tokenises a request; also returns the chat that it asks for, if it does. Blocks while it tokenises.
    If the seed is absent, a random one is chosen.

    `deadline_s` in `time.monotonic()` seconds. `least_priority`: the lowest number that the caller may ask for, and
    what it gets unless it asks for one. `cache_scope`, `pool`: see `GenerationRequest`. `chats_have_control_tokens`:
    see `Chat.has_control_tokens`. `router`: exact without one is served by what needs none. Raises InvalidInput,
    PromptTooLong, PermissionDenied (reason PRIORITY_NOT_ALLOWED), Cancelled if the caller has gone, and
    PreconditionFailed: PROMPT_DIFFERS if it resumes an answer to other tokens, ROUTER_REQUIRED for relaxed without a
    router.
    """
    # The cheap checks come before the prompt is tokenised.
    priority = request.priority if request.HasField("priority") else least_priority
    if priority < least_priority:
        raise PermissionDenied(
            f"the priority is {priority}; this caller's requests have at least {least_priority}",
            reason="PRIORITY_NOT_ALLOWED",
            metadata={"least_priority": str(least_priority)},
        )
    if request.learn not in inference_pb2.Learn.values():
        raise InvalidInput(f"learn is {request.learn}, which is none of its values", metadata={"field": "learn"})
    defaults = taken_defaults(request, loaded)
    sampling = to_sampling(request.sampling, loaded, defaults)
    stopping = to_stopping(request.stopping, defaults)
    policy = to_policy(request.depth)
    answer = to_constraint(request.constraint) if request.HasField("constraint") else None
    constraint: Constraint | MessageConstraint | None = answer
    is_chat = request.WhichOneof("prompt") == "chat"
    chat = PreparedChat(request.chat, loaded, has_control_tokens=chats_have_control_tokens) if is_chat else None
    prompt_ids = encode_prompt(loaded, chat.prompt if chat else _prompt(request, loaded))
    if chat is not None:
        constraint = chat.constraint(answer, prompt_ids)
    prediction, expected = request.prediction, request.resume.prompt_digest
    if expected and expected != prompt_digest(prompt_ids):
        raise PreconditionFailed(
            "the answer to resume was begun after other tokens: the worker that began it has another tokenizer or chat "
            "template",
            reason="PROMPT_DIFFERS",
        )
    generation = GenerationRequest(
        prompt_ids=prompt_ids,
        sampling=sampling,
        stopping=stopping,
        policy=policy,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        num_scored=request.resume.num_prompt_tokens,
        request_id=request_id,
        client=client,
        on_behalf_of=on_behalf_of,
        deadline_s=deadline_s,
        priority=priority,
        # The engine refuses so many, and millions of ids need not become Python integers before.
        resumed_ids=tuple(request.resume.token_ids[: loaded.context_length]),
        constraint=constraint,
        shown_special_ids=chat.shown_special_ids if chat else frozenset(),
        # One more than may be, so that more are refused.
        prediction_ids=encode_prediction(
            loaded, prediction.text or list(prediction.token_ids.ids[: loaded.context_length + 1])
        ),
        cache_scope=cache_scope,
        pool=pool,
        router_version=router.version if router else 0,
        router_alias=router.alias if router else "",
    )
    if policy.name == "relaxed" and router is None:
        raise PreconditionFailed(
            "the policy relaxed needs a router, and none is published for this model: calibrate one with `neap "
            "calibrate`, or ask for the policy exact or full",
            reason="ROUTER_REQUIRED",
        )
    return generation, chat


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """Stands for the token ids of a prompt. Only for token ids that have been checked."""
    return hashlib.sha256(key_of(prompt_ids)).hexdigest()[:32]


def _prompt(request: inference_pb2.GenerateRequest, loaded: LoadedModel) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        check_num_ids(len(request.token_ids.ids), loaded)
        return list(request.token_ids.ids)
    raise InvalidInput("the prompt is empty", reason="EMPTY_PROMPT")


def check_num_ids(count: int, loaded: LoadedModel) -> None:
    """For token ids of a prompt, before millions of them become Python integers. Raises PromptTooLong."""
    if count >= loaded.context_length:
        raise PromptTooLong(
            f"the prompt has {count} tokens; {loaded.model_id} holds {loaded.context_length}, prompt and completion "
            "together",
            metadata={"context_length": str(loaded.context_length)},
        )


def taken_defaults(request: inference_pb2.GenerateRequest, loaded: LoadedModel) -> GenerationDefaults:
    """What the request takes from the model, because it leaves it open."""
    if not request.model_defaults:
        return NO_DEFAULTS
    offered = {"temperature": 1.0, **loaded.defaults.sampling}
    sampling = {name: value for name, value in offered.items() if not request.sampling.HasField(name)}
    return GenerationDefaults(sampling, None if request.stopping.HasField("max_tokens") else loaded.defaults.max_tokens)


def to_sampling(
    sampling: inference_pb2.Sampling, loaded: LoadedModel, defaults: GenerationDefaults = NO_DEFAULTS
) -> SamplingParams:
    """An absent field without a default switches its rule off. Raises InvalidInput."""
    if sampling.HasField("top_k") and sampling.top_k == 0:
        raise InvalidInput("top_k is 0; it must be at least 1, or absent")
    fields = {field.name: value for field, value in sampling.ListFields()}
    if sampling.bad_words:
        fields["bad_words"] = _bad_words(sampling.bad_words, loaded)
    return SamplingParams(**{"seed": secrets.randbits(64), **defaults.sampling, **fields})


def _bad_words(words: Sequence[inference_pb2.BadWord], loaded: LoadedModel) -> list[Sequence[int]]:
    if why := FIELDS["Sampling"]["bad_words"].refusal(words):
        raise InvalidInput(why)
    sequences: list[Sequence[int]] = []
    for word in words:
        if word.WhichOneof("word") == "token_ids":
            sequences.append(word.token_ids.ids)
        elif len(word.text) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidInput(
                f"one of bad_words has {len(word.text)} characters; at most {MAX_BAD_WORD_CHARACTERS} are allowed"
            )
        else:
            sequences += encode_bad_word(loaded, word.text)
    return sequences


def to_stopping(stopping: inference_pb2.Stopping, defaults: GenerationDefaults = NO_DEFAULTS) -> StoppingParams:
    """Raises InvalidInput."""
    for name in ("stop_strings", "stop_token_ids"):
        check_items(name, getattr(stopping, name))
    return StoppingParams(
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else defaults.max_tokens,
        stop_strings=tuple(stopping.stop_strings),
        stop_token_ids=frozenset(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
    )


def check_items(name: str, values: Sequence[object], called: str = "") -> None:
    """Millions of empty texts or ids fit a message, and would become objects before they are counted. `called`: the
    caller's name of the field of Stopping. Raises InvalidInput."""
    if why := FIELDS["Stopping"][name].refusal(values):
        raise InvalidInput(why.replace(name, called or name))


def from_defaults(defaults: GenerationDefaults) -> inference_pb2.GenerationDefaults:
    sampling: dict[str, Any] = dict(defaults.sampling)
    return inference_pb2.GenerationDefaults(sampling=inference_pb2.Sampling(**sampling), max_tokens=defaults.max_tokens)


def to_policy(depth: inference_pb2.DepthPolicy) -> DepthPolicy:
    """The default policy is exact. Raises InvalidInput."""
    kind = depth.WhichOneof("policy")
    limits = {field.name: value for field, value in getattr(depth, kind).ListFields()} if kind else {}
    return DepthPolicy(kind or "exact", min_layers=depth.min_layers, **limits)


def to_constraint(constraint: inference_pb2.Constraint) -> Constraint:
    """Raises InvalidInput (reason CONSTRAINT_INVALID) if it has no form, is too large or has an empty choice."""
    form = constraint.WhichOneof("form")
    if form == "choice":
        if len(constraint.choice.texts) > MAX_BYTES:  # as above; each has a byte
            raise invalid(f"it has {len(constraint.choice.texts)} texts", "choice")
        return Constraint(choice=tuple(constraint.choice.texts))
    if form == "json_object":
        return Constraint(json_object=True)
    return Constraint(**({form: getattr(constraint, form)} if form else {}), strict=constraint.strict)


def to_router_choice(selector: inference_pb2.RouterSelector) -> RouterChoice:
    """An empty selector chooses the default router. Raises InvalidInput."""
    kind = selector.WhichOneof("selector")
    if kind == "version":
        return RouterChoice(version=selector.version)
    if kind == "alias":
        return RouterChoice(alias=selector.alias)
    return RouterChoice()


def from_event(
    event: GenerationEvent, text_of: Callable[[int], str], message: AnswerParser | None = None
) -> inference_pb2.GenerateResponse:
    """Converts an event to the response that carries it.
    `text_of` gives the text of a token that has a log-probability. `message` reads the answer to a chat."""
    part = MessagePart(event.text)
    if message is not None:
        part = message.finish(event.text) if isinstance(event, Finished) else message.push(event.texts)
    content: dict[str, Any] = {
        "text": part.text,
        "reasoning": part.reasoning,
        "tool_calls": [inference_pb2.ToolCallChunk(**vars(call)) for call in part.calls],
    }
    if isinstance(event, Finished):
        num_reasoning = message.num_reasoning_tokens if message is not None else 0
        return inference_pb2.GenerateResponse(finished=_finished(event, content, num_reasoning))
    if event.logprobs:
        tokens = [_scored_token(token, text_of) for token in event.tokens]
    else:
        tokens = [
            inference_pb2.Token(id=token_id, exit_depth=way.depth, proposer=way.proposer)
            for token_id, way in zip(event.token_ids, event.exits, strict=True)
        ]
    prompt = [_scored_token(token, text_of) for token in event.prompt]
    chunk = inference_pb2.TokenChunk(tokens=tokens, prompt_tokens=prompt, **content)
    return inference_pb2.GenerateResponse(chunk=chunk)


def _scored_token(token: GeneratedToken, text_of: Callable[[int], str]) -> inference_pb2.Token:
    return inference_pb2.Token(
        text=text_of(token.token_id),
        id=token.token_id,
        exit_depth=token.exit_depth,
        proposer=token.proposer,
        logprob=token.logprob,
        alternatives=[
            inference_pb2.Alternative(id=token_id, logprob=logprob, text=text_of(token_id))
            for token_id, logprob in token.alternatives
        ],
    )


def _finished(event: Finished, content: dict[str, Any], num_reasoning_tokens: int) -> inference_pb2.Finished:
    return inference_pb2.Finished(
        **content,
        reason=_REASONS[event.reason],
        stop_match=event.stop_match,
        usage=inference_pb2.Usage(
            num_prompt_tokens=event.num_prompt_tokens,
            num_cached_tokens=event.num_cached_tokens,
            num_completion_tokens=event.num_completion_tokens,
            num_accepted_prediction_tokens=event.num_accepted_prediction_tokens,
            num_rejected_prediction_tokens=event.num_rejected_prediction_tokens,
            num_reasoning_tokens=num_reasoning_tokens,
        ),
        timing=inference_pb2.Timing(
            queue=_duration(event.queue_s), prefill=_duration(event.prefill_s), decode=_duration(event.decode_s)
        ),
        depth=_statistics(event.depth),
    )


def _statistics(depth: DepthStatistics) -> inference_pb2.DepthStatistics:
    exits = sorted((proposer_depth, proposer, count) for proposer, (proposer_depth, count) in depth.exits.items())
    return inference_pb2.DepthStatistics(
        exits=[
            inference_pb2.ProposerCount(proposer=proposer, depth=proposer_depth, num_tokens=count)
            for proposer_depth, proposer, count in exits
        ],
        num_drafted=depth.num_drafted,
        num_accepted=depth.num_accepted,
        num_layer_executions=depth.num_layer_executions,
        mean_layers_per_token=depth.mean_layers_per_token,
        num_deep_passes=depth.num_verify_passes,
        num_token_layers=depth.num_token_layers,
        num_relaxed=depth.num_relaxed,
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
