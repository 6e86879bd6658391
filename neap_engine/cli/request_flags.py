"""The flags of commands that generate: those of a request, written once."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
from neap_client.fields import FIELDS
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import DEPTH, Policy
from neap_client.rules import Field

from neap_engine.cli.console import with_flags

T = TypeVar("T")
# Fields of the protos that have no flag: a terminal does not show what they ask for.
WITHOUT_FLAG = {"logprobs", "prompt_logprobs", "model_defaults"}


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
    router: Annotated[
        str, typer.Option("--router", help="Version number or alias of a router. Default: the worker's default alias.")
    ] = "",
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "--logit-bias",
            metavar="TOKEN=BIAS",
            help=FIELDS["Sampling"]["logit_bias"].described,
        ),
    ] = None,
    bad_words: Annotated[
        list[str] | None,
        typer.Option(
            "--bad-words",
            help=f"{FIELDS['Sampling']['bad_words'].described} As the tokenizer spells it; may be given several times.",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop", help=f"{FIELDS['Stopping']['stop_strings'].described} The flag may be given several times."
        ),
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
    """Return the flags that are no numbers as arguments of `generate_request`."""
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


WRITTEN = inspect.signature(request_options).parameters


def _flag(field: Field) -> inspect.Parameter:
    """The flag of a field with a plain value. The worker checks what no flag can: limits of fractions."""
    whole = field.python_type is int
    option = typer.Option(
        f"--{field.name.replace('_', '-')}",
        help=field.described,
        min=int(field.least) if whole and field.least is not None and field.off is None else None,
        max=int(field.most) if whole and field.most is not None else None,
    )
    kind: Any = list[int] if field.is_list else field.python_type
    default = False if kind is bool else None
    annotation: Any = Annotated[kind if kind is bool else kind | None, option]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def request_flags() -> list[inspect.Parameter]:
    """All flags of a request: those above, and one for each other field of the protos with plain values."""
    # "stop" is the flag of stop_strings.
    others = WITHOUT_FLAG | {*WRITTEN, "stop_strings"}
    fields = (field for kind in (*DEPTH, "Stopping", "Sampling", "GenerateRequest") for field in FIELDS[kind].values())
    return [*WRITTEN.values(), *(_flag(field) for field in fields if field.name not in others)]


def takes_request_flags(command: Callable[..., T]) -> Callable[..., T]:
    """Wrap a command so that it has the flags of a request. They arrive as its argument `options`."""
    flags = request_flags()

    def run(*args: Any, **kwargs: Any) -> T:
        given = {flag.name: kwargs.pop(flag.name) for flag in flags if flag.name in kwargs}
        options = request_options(**{name: given.pop(name) for name in WRITTEN if name in given})
        return command(*args, options=options | given, **kwargs)

    return with_flags(run, command, flags, without="options")
