"""The flags of commands that generate: those of a request, written once."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import Policy

from neap_engine.cli.console import with_flags

T = TypeVar("T")


def request_options(
    *,
    policy: Annotated[
        Policy,
        typer.Option(
            "--policy",
            help="Depth policy. full: no early exits. exact: early tokens are drafts that the full model verifies, so "
            "the output is that of full. relaxed is lossy: drafts are also accepted that the full model ranks close to "
            "its own choice (--margin), or that are probable enough (--threshold).",
        ),
    ] = "exact",
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            help="With --policy relaxed: accept a draft whose calibrated probability is at least this, in (0, 1]. A "
            "wrong token may then be any token; a margin loses less for the same speed. Default: 0.85, if there is no "
            "--margin.",
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            "--margin",
            help="With --policy relaxed: accept a draft if the full model prefers its own choice by at most this "
            "difference of natural log-probabilities.",
        ),
    ] = None,
    max_drafts: Annotated[
        int,
        typer.Option(
            "--max-drafts",
            min=0,
            help="With --policy exact: maximum number of drafts per verify pass. 0 means that the worker chooses.",
        ),
    ] = 0,
    min_layers: Annotated[
        int,
        typer.Option(
            "--min-layers",
            min=0,
            help="Number of layers that a token passes before it may leave. 0 allows exits before the first layer.",
        ),
    ] = 0,
    router: Annotated[
        str, typer.Option("--router", help="Version number or alias of a router. Default: the worker's default alias.")
    ] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", help="Maximum number of new tokens. Default: 256, or fewer if the context is full before."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="Sampling temperature; 0 means greedy decoding. Default: 0.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=0, help="Sample from the k most probable tokens, k >= 1. Default: off.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            help="Sample from the smallest set of tokens with this total probability, in (0, 1]. Default: off.",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            help="Drop tokens less probable than this fraction, in [0, 1], of the most probable token. Default: off.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            help="Penalty on tokens that occurred before, in [0.01, 100]; above 1 makes them less likely. "
            "Default: 1, off.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Random seed for sampling. Default: the worker chooses one.")
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            "--presence-penalty", help="Penalty, in [-2, 2], on tokens that the answer has already. Default: 0, off."
        ),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            "--frequency-penalty",
            help="Penalty, in [-2, 2], on tokens for each time that the answer has them already. Default: 0, off.",
        ),
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "--logit-bias",
            metavar="TOKEN=BIAS",
            help="Add a number in [-100, 100] to the logit of a token id. May be given up to 1,024 times.",
        ),
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option("--min-tokens", min=0, help="Do not end before so many new tokens. Default: 0.")
    ] = None,
    bad_words: Annotated[
        list[str] | None,
        typer.Option(
            "--bad-words",
            help="A word that the answer must not contain, as the tokenizer spells it. May be given up to 256 times.",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End before this string. May be given up to 16 times, each at most 256 bytes."),
    ] = None,
    prediction: Annotated[
        Path | None,
        typer.Option(
            "--prediction",
            exists=True,
            dir_okay=False,
            help="A file with a text that the answer is expected to be like, such as a text that it edits. It makes "
            "exact faster where it is right, and changes no token.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not end at the model's end-of-sequence tokens.")
    ] = False,
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority",
            min=-100,
            max=100,
            help="Requests with lower numbers come first. Default: the priority of your role, 0 unless set.",
        ),
    ] = None,
    learn: Annotated[
        Literal["never"] | None,
        typer.Option("--learn", help="never: nothing of the request is kept to learn from. Default: the worker's."),
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            "--json-schema",
            exists=True,
            dir_okay=False,
            help="File with a JSON Schema: the answer is JSON that fulfils it. Default: none.",
        ),
    ] = None,
) -> dict[str, Any]:
    """Return the flags as arguments of `generate_request`."""
    options = locals()  # most flags are arguments of that name
    schema: Path | None = options.pop("json_schema")
    return options | {
        "logit_bias": dict(map(_bias, logit_bias or ())),
        "bad_words": bad_words or (),
        "stop": stop or (),
        "prediction": prediction.read_text(encoding="utf-8") if prediction else "",
        "constraint": pb.Constraint(json_schema=schema.read_text(encoding="utf-8")) if schema else None,
    }


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise typer.BadParameter(f"--logit-bias is {text!r}; it must be TOKEN=BIAS") from error


def takes_request_flags(command: Callable[..., T]) -> Callable[..., T]:
    """Wrap a command so that it has the flags of a request. They arrive as its argument `options`."""
    flags = inspect.signature(request_options).parameters

    def run(*args: Any, **kwargs: Any) -> T:
        options = request_options(**{name: kwargs.pop(name) for name in flags if name in kwargs})
        return command(*args, options=options, **kwargs)

    return with_flags(run, command, flags.values(), without="options")
