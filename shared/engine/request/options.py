"""The options of a call of `Engine.generate` or `Engine.submit`, and the request that they make."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypedDict

from shared.constraints.constraint import Constraint
from shared.engine.request.prompt import Prompt, encode_prediction, encode_prompt
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel
from shared.model.sampling import SamplingParams


class RequestOptions(TypedDict, total=False):
    """`policy`: by default "exact". `sampling`: by default greedy. `logprobs`: so many alternatives for each token,
    `prompt_logprobs`: for each of the prompt. `resumed_ids` and `constraint` as in `GenerationRequest`. `prediction`: a
    text, or token ids, that the answer is expected to be like. The others are those of `StoppingParams`."""

    policy: DepthPolicy | str
    sampling: SamplingParams | None
    logprobs: int | None
    prompt_logprobs: int | None
    resumed_ids: Sequence[int]
    constraint: Constraint | None
    prediction: str | Sequence[int]
    max_tokens: int | None
    stop_strings: Sequence[str]
    stop_token_ids: Collection[int]
    ignore_eos: bool


_GROUPS = {"sampling": SamplingParams, "policy": DepthPolicy, "constraint": Constraint}
# Names of other libraries.
_OTHER_NAMES = {"max_new_tokens": "max_tokens", "max_length": "max_tokens", "stop": "stop_strings"}


def request_of(loaded: LoadedModel, prompt: Prompt, options: Mapping[str, Any]) -> GenerationRequest:
    """The request for one prompt. Raises `InvalidInput` (reason UNKNOWN_OPTION, `metadata["option"]`; or another) and
    `PromptTooLong`."""
    known = RequestOptions.__annotations__
    for name in options:
        if name not in known:
            raise _unknown(name)
    stopping = {f.name: options[f.name] for f in fields(StoppingParams) if f.name in options}
    sampling, policy = options.get("sampling"), options.get("policy", "exact")
    constraint = options.get("constraint")
    if constraint is not None:
        _check_type("constraint", constraint, Constraint)
    if isinstance(policy, str):
        policy = DepthPolicy(policy)  # type: ignore[arg-type]
    _check_type("policy", policy, DepthPolicy)
    if sampling is not None:
        _check_type("sampling", sampling, SamplingParams)
    return GenerationRequest(
        prompt_ids=encode_prompt(loaded, prompt),
        sampling=sampling or SamplingParams(),
        stopping=StoppingParams(**stopping),
        policy=policy,
        logprobs=options.get("logprobs"),
        prompt_logprobs=options.get("prompt_logprobs"),
        resumed_ids=options.get("resumed_ids", ()),
        constraint=constraint,
        prediction_ids=encode_prediction(loaded, options.get("prediction", ())),
    )


def _check_type(name: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        raise InvalidInput(f"{name} is a {type(value).__name__}; it must be a {expected.__name__}")


def _unknown(name: str) -> InvalidInput:
    """An error that says where an option belongs, or which one may have been meant."""
    for group, kind in _GROUPS.items():
        if any(field.name == name for field in fields(kind)):
            hint = f"it belongs to the {group}: {group}={kind.__name__}({name}=..)"
            break
    else:
        known = list(RequestOptions.__annotations__)
        meant = _OTHER_NAMES.get(name) or next(iter(get_close_matches(name, known, 1)), None)
        hint = f"did you mean {meant}?" if meant else f"there are: {', '.join(known)}"
    return InvalidInput(f"a request has no option {name}: {hint}", reason="UNKNOWN_OPTION", metadata={"option": name})
