"""Builds requests for generations."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack

from neap_client.errors import InvalidInput
from neap_client.fields import FIELDS, DepthFields, RequestFields
from neap_client.inference.v1 import inference_pb2 as pb

Policy = Literal["full", "exact", "relaxed"]
DEPTH = ("DepthPolicy", "Exact", "Relaxed")


def generate_request(
    model_id: str,
    prompt: str | Sequence[pb.ChatMessage] | pb.Chat | pb.TokenIds,
    *,
    system: str = "",
    raw: bool = False,
    policy: Policy = "exact",
    router: str | int = "",
    stop: Sequence[str] = (),
    bad_words: Sequence[str | Sequence[int]] = (),
    constraint: pb.Constraint | None = None,
    prediction: str | Sequence[int] = "",
    learn: Literal["never"] | None = None,
    **fields: Unpack[RequestFields],
) -> pb.GenerateRequest:
    """Return a request. The protos describe the arguments; None leaves a field absent.

    A `prompt` of text is the user's message of a chat, after a `system` message if there is one. A Chat may have tools.
    With `raw` the text is continued as it is, without the chat template. Each of `bad_words` is a text or token ids,
    and so is `prediction`. `router` is a version or an alias. `fields`: those with plain values of the messages in
    `neap_client.fields`, under their names. Raises InvalidInput for arguments that exclude each other, and TypeError
    for others.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    request = pb.GenerateRequest(
        model_id=model_id,
        sampling=pb.Sampling(bad_words=map(_bad_word, bad_words), **_of("Sampling", given)),
        stopping=pb.Stopping(stop_strings=stop, **_of("Stopping", given)),
        depth=depth_policy(policy, **{name: value for kind in DEPTH for name, value in _of(kind, given).items()}),
        constraint=constraint,
        prediction=_prediction(prediction),
        learn=_learn(learn),
        **_of("GenerateRequest", given),
    )
    if given:
        raise TypeError(f"generate_request has no argument {', '.join(given)}")
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


def _of(message: str, given: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of a message from those given."""
    return {name: given.pop(name) for name in FIELDS[message] if name in given}


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


def depth_policy(policy: str, **settings: Unpack[DepthFields]) -> pb.DepthPolicy:
    """Build the DepthPolicy message. Raises InvalidInput for an unknown policy or a setting that the policy does not
    have; its metadata names the argument as "field"."""
    if policy not in ("full", "exact", "relaxed"):
        raise _bad_depth("policy", f"policy is {policy!r}; it must be full, exact or relaxed")
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    own = _of(policy.capitalize(), given) if policy != "full" else {}
    for other in ("exact", "relaxed"):
        for name, field in FIELDS[other.capitalize()].items():
            # A field that is always there is absent if it is 0.
            if name in given and (given.pop(name) or field.is_optional):
                raise _bad_depth(name, f"{name} applies to the policy {other}, not to {policy}")
    kind = {"full": pb.Full, "exact": pb.Exact, "relaxed": pb.Relaxed}[policy]
    return pb.DepthPolicy(**{policy: kind(**own)}, **given)


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
