"""`neap generate`: streams one continuation from a worker."""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from neap_client import NeapClient, generate_request
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import Policy, set_prompt

from shared.cli.connection import calls_service, connect
from shared.cli.console import DEFAULT_WORKER, Worker, err, out
from shared.cli.depth_view import DepthView
from shared.cli.json_lines import print_message
from shared.cli.measure import statistics_line
from shared.cli.risk_view import bound_line
from shared.errors import InvalidInput, NeapError

NO_CHAT_TEMPLATE = "NO_CHAT_TEMPLATE"
PLAIN_TEXT_NOTE = "the model has no chat template: prompts are continued as plain text"


@calls_service
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt. - reads it from standard input.")],
    worker: Worker = DEFAULT_WORKER,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="Id of the model. Needed only if the worker serves more than one model.",
        ),
    ] = "",
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the prompt as plain text, without the chat template."),
    ] = False,
    system: Annotated[
        str, typer.Option("--system", help="System message of the chat. Default: none.")
    ] = "",
    policy: Annotated[
        Policy,
        typer.Option(
            "--policy",
            help="Depth policy. full: no early exits. exact: early tokens are drafts that the full model verifies, "
            "so the output is that of full. relaxed: with --margin, drafts are also accepted that the full model ranks close to its own "
            "choice; without it, early tokens are final where the router is confident.",
        ),
    ] = "exact",
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            help="With --policy relaxed: router probability, in (0, 1], from which an early token is final. "
            "A wrong token may then be any token; a margin loses less for the same speed. Default: 0.85, if there is no --margin.",
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            "--margin",
            help="With --policy relaxed: accept a draft if the full model prefers its own choice by at most this difference of "
            "natural log-probabilities.",
        ),
    ] = None,
    max_drafts: Annotated[
        int,
        typer.Option(
            "--max-drafts",
            min=0,
            help="With --policy exact: maximum number of drafts per deep pass. "
            "0 means that the worker chooses.",
        ),
    ] = 0,
    min_layers: Annotated[
        int,
        typer.Option(
            "--min-layers",
            min=0,
            help="Number of layers that a token passes before it may leave. "
            "0 allows exits before the first layer.",
        ),
    ] = 0,
    router: Annotated[
        str,
        typer.Option(
            "--router", help="Router to use: a version number or an alias. Default: latest."
        ),
    ] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            help="Maximum number of new tokens. Default: 256, or fewer if the context is full before.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help="Sampling temperature; 0 means greedy decoding. Default: 0.",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", min=0, help="Sample from the k most probable tokens, k >= 1. Default: off."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            help="Sample from the smallest set of tokens with this total probability, in (0, 1]. "
            "Default: off.",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            help="Drop tokens less probable than this fraction, in [0, 1], of the most probable token. "
            "Default: off.",
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
        int | None,
        typer.Option(
            "--seed", min=0, help="Random seed for sampling. Default: the worker chooses one."
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop",
            help="End before this string. May be given up to 16 times, each at most 256 bytes.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Do not end at the model's end-of-sequence tokens."),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", min=0, help="Deadline of the whole request in seconds. Default: none."
        ),
    ] = None,
    show_depth: Annotated[
        bool,
        typer.Option(
            "--show-depth",
            help="Colour each token by the depth at which it left, and print a legend to standard error.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event as one line of JSON.")
    ] = False,
) -> None:
    """Generate text and stream it to standard output. A line of statistics goes to standard error.

    If the model has no chat template, the prompt is continued as plain text, and a line on standard error says so.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    with connect(worker) as client:
        served = served_model(client, model)
        request = generate_request(
            served.model_id,
            text,
            system=system,
            raw=raw,
            policy=policy,
            threshold=threshold,
            margin=margin,
            max_drafts=max_drafts,
            min_layers=min_layers,
            router=router,
            max_tokens=max_tokens,
            stop=stop or (),
            ignore_eos=ignore_eos,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )

        def show() -> None:
            events = client.generate(request, timeout_s=timeout)
            if as_json:
                for event in events:
                    print_message(event)
            else:
                print_text(events, served.num_layers, coloured=show_depth)

        try:
            show()
        except NeapError as error:
            # Plain text would lose the system message, so with --system the error is shown instead.
            if error.reason != NO_CHAT_TEMPLATE or system:
                raise
            err.print(PLAIN_TEXT_NOTE, markup=False, style="dim")
            set_prompt(request, text, raw=True)
            show()


def print_text(events: Iterator[pb.GenerateResponse], num_layers: int, *, coloured: bool) -> None:
    """Stream the text to standard output. The legend and the statistics go to standard error."""
    view = DepthView(out, num_layers, coloured)
    finished: pb.Finished | None = None
    started: pb.Started | None = None
    for event in events:
        if event.HasField("chunk"):
            view.chunk(event.chunk)
        elif event.HasField("started"):
            started = event.started
        elif event.HasField("finished"):
            finished = event.finished
            view.text(finished.text)
    out.print()
    if coloured:
        err.print(view.legend())
    if finished is not None:
        err.print(statistics_line(finished), markup=False, style="dim")
    if started is not None and started.policy == "relaxed":
        err.print(bound_line(started), markup=False, style="dim")


def served_model(client: NeapClient, model_id: str) -> pb.Model:
    """Return the model by name, or the worker's only model. Raises NotFound, or InvalidInput if `model_id` is needed."""
    if model_id:
        return client.get_model(model_id)
    models = client.list_models()
    if len(models) != 1:
        names = ", ".join(model.model_id for model in models) or "none"
        raise InvalidInput(f"the worker serves {names}; choose a model with --model")
    return models[0]
