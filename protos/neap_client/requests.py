"""Builds requests for generations."""

from collections.abc import Mapping, Sequence
from typing import Literal

from neap_client.errors import InvalidInput
from neap_client.inference.v1 import inference_pb2 as pb

Policy = Literal["full", "exact", "relaxed"]


def generate_request(
    model_id: str,
    prompt: str | Sequence[pb.ChatMessage] | pb.Chat | pb.TokenIds,
    *,
    system: str = "",
    raw: bool = False,
    policy: Policy = "exact",
    threshold: float | None = None,
    margin: float | None = None,
    max_drafts: int = 0,
    min_layers: int = 0,
    router: str | int = "",
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    min_tokens: int | None = None,
    bad_words: Sequence[str | Sequence[int]] = (),
    logprobs: int | None = None,
    priority: int | None = None,
    constraint: pb.Constraint | None = None,
    prediction: str | Sequence[int] = "",
    prompt_logprobs: int | None = None,
    model_defaults: bool | None = None,
    learn: Literal["never"] | None = None,
) -> pb.GenerateRequest:
    """Return a request. The protos describe the arguments; None leaves a field absent.

    A `prompt` of text is the user's message of a chat, after a `system` message if there is one. A Chat may have tools.
    With `raw` the text is continued as it is, without the chat template. Each of `bad_words` is a text or token ids,
    and so is `prediction`. `router` is a version or an alias. Raises InvalidInput for arguments that exclude each
    other.
    """
    request = pb.GenerateRequest(
        model_id=model_id,
        sampling=pb.Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            min_tokens=min_tokens,
            bad_words=map(_bad_word, bad_words),
        ),
        stopping=pb.Stopping(
            max_tokens=max_tokens, stop_strings=stop, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
        ),
        depth=depth_policy(policy, threshold=threshold, margin=margin, max_drafts=max_drafts, min_layers=min_layers),
        logprobs=logprobs,
        priority=priority,
        constraint=constraint,
        prediction=_prediction(prediction),
        prompt_logprobs=prompt_logprobs,
        model_defaults=model_defaults,
        learn=_learn(learn),
    )
    if isinstance(prompt, str):
        set_prompt(request, prompt, raw=raw, system=system)
    elif raw or system:
        raise InvalidInput("raw and system need a prompt of text")
    elif isinstance(prompt, pb.TokenIds):
        request.token_ids.CopyFrom(prompt)
    elif isinstance(prompt, pb.Chat):
        request.chat.CopyFrom(prompt)
    else:
        request.chat.messages.extend(prompt)
    set_router(request, router)
    return request


def _learn(learn: str | None) -> pb.Learn | None:
    if learn not in (None, "never"):
        raise InvalidInput(f"learn is {learn!r}; it must be 'never' or None", metadata={"field": "learn"})
    return pb.LEARN_NEVER if learn else None


def _bad_word(word: str | Sequence[int]) -> pb.BadWord:
    if isinstance(word, str):
        return pb.BadWord(text=word)
    return pb.BadWord(token_ids=pb.TokenIds(ids=word))


def _prediction(prediction: str | Sequence[int]) -> pb.Prediction | None:
    if isinstance(prediction, str):
        return pb.Prediction(text=prediction) if prediction else None
    return pb.Prediction(token_ids=pb.TokenIds(ids=prediction))


def depth_policy(
    policy: str,
    *,
    threshold: float | None = None,
    margin: float | None = None,
    max_drafts: int = 0,
    min_layers: int = 0,
) -> pb.DepthPolicy:
    """Build the DepthPolicy message. Raises InvalidInput for an unknown policy or a setting that the policy does not
    have; its metadata names the argument as "field"."""
    for name, value in (("threshold", threshold), ("margin", margin)):
        if value is not None and policy != "relaxed":
            raise _bad_depth(name, f"{name} applies to the policy relaxed, not to {policy}")
    if max_drafts and policy != "exact":
        raise _bad_depth("max_drafts", f"max_drafts applies to the policy exact, not to {policy}")
    if policy == "full":
        return pb.DepthPolicy(full=pb.Full(), min_layers=min_layers)
    if policy == "exact":
        return pb.DepthPolicy(exact=pb.Exact(max_drafts=max_drafts), min_layers=min_layers)
    if policy == "relaxed":
        relaxed = pb.Relaxed(threshold=threshold, margin=margin)
        return pb.DepthPolicy(relaxed=relaxed, min_layers=min_layers)
    raise _bad_depth("policy", f"policy is {policy!r}; it must be full, exact or relaxed")


def _bad_depth(field: str, message: str) -> InvalidInput:
    return InvalidInput(message, metadata={"field": field})


def set_prompt(request: pb.GenerateRequest, text: str, *, raw: bool, system: str = "") -> None:
    """Set `text` as plain text (`raw`) or as the user message of a chat.
    Raises InvalidInput for `raw` with a system message."""
    if raw and system:
        raise InvalidInput("a system message needs the chat template; raw text has none")
    if raw:
        request.text = text
        return
    if system:
        request.chat.messages.add(role="system", content=system)
    request.chat.messages.add(role="user", content=text)


def set_router(request: pb.GenerateRequest, router: str | int) -> None:
    """Set the router: a number or digits are a version, other text is an alias, empty text leaves the choice to the
    worker."""
    if isinstance(router, int) or router.isdigit():
        request.router.version = int(router)
    elif router:
        request.router.alias = router
