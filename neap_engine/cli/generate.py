"""`neap generate`: streams one continuation from a worker."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from google.protobuf.duration_pb2 import Duration
from neap_client import GenerationStream, NeapClient, generate_request
from neap_client.inference.v1 import inference_pb2 as pb
from neap_client.requests import set_prompt
from rich.console import Console
from rich.text import Text

from neap_engine.cli.connection import calls_service, connect, say
from neap_engine.cli.console import DEFAULT_WORKER, ServedModel, Worker, err, out, print_message
from neap_engine.cli.interruption import interruptible
from neap_engine.cli.request_flags import takes_request_flags
from shared.errors import InvalidInput, NeapError

NO_CHAT_TEMPLATE = "NO_CHAT_TEMPLATE"
PLAIN_TEXT_NOTE = "the model has no chat template: prompts are continued as plain text"


FULL = "full"
# From the shallowest exit to the deepest. Tokens of the full model keep the terminal's default colour.
SHADES = ("bright_green", "green", "cyan", "bright_blue", "blue", "magenta", "bright_magenta")
FULL_STYLE = "default"


def proposer_colour(proposer: str, depth: int, num_layers: int) -> str:
    """Return the colour of a proposer by its depth. Exits before the first layer are green."""
    if proposer == FULL:
        return FULL_STYLE
    if depth == 0:
        return SHADES[0] if proposer == "prompt-lookup" else SHADES[1]
    return SHADES[min(2 + depth * 5 // max(num_layers, 1), len(SHADES) - 1)]


@dataclass
class DepthView:
    """Prints chunks as they arrive and counts tokens for the legend. `num_layers` is the model's depth L."""

    console: Console
    num_layers: int
    coloured: bool
    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    _pending: list[tuple[str, int]] = field(default_factory=list)

    def show(self, event: pb.GenerateResponse) -> None:
        """Print the text of an event.

        Text may lag behind tokens, because one character may span two tokens. A chunk of several tokens does not say
        which token wrote which text, so all its text has the colour of the deepest token.
        """
        for token in event.chunk.tokens:
            key = (token.proposer, token.exit_depth)
            self.counts[key] = self.counts.get(key, 0) + 1
            self._pending.append(key)
        text = event.chunk.text + event.finished.text
        if not text:
            return
        style = FULL_STYLE
        if self.coloured and self._pending:
            proposer, depth = max(self._pending, key=lambda key: key[1])
            style = proposer_colour(proposer, depth, self.num_layers)
        self._pending.clear()
        self.console.print(Text(text, style=style), end="")

    def legend(self) -> Text:
        """Return one line with every proposer that was used, in its colour, and the number of tokens that left
        there."""
        line = Text("left at: ")
        order = sorted(self.counts.items(), key=lambda item: (item[0][1], item[0][0]))
        for (proposer, depth), count in order:
            style = proposer_colour(proposer, depth, self.num_layers)
            line.append(f"{proposer} ({depth}/{self.num_layers}) {count}", style=f"bold {style}")
            line.append("  ")
        return line


@calls_service
@takes_request_flags
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt. - reads it from standard input.")],
    worker: Worker = DEFAULT_WORKER,
    model: ServedModel = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")
    ] = False,
    system: Annotated[str, typer.Option("--system", help="System message of the chat. Default: none.")] = "",
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, help="Deadline of the whole request in seconds. Default: none.")
    ] = None,
    show_depth: Annotated[
        bool,
        typer.Option(
            "--show-depth",
            help="Colour each token by the depth at which it left, and print a legend to standard error.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")] = False,
    *,
    options: dict[str, Any],
) -> None:
    """Generate text and stream it to standard output. A line of statistics goes to standard error.

    If the model has no chat template, the prompt is continued as plain text, and a line on standard error says so.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    with connect(worker) as client:
        served = served_model(client, model)
        request = generate_request(served.model_id, text, system=system, raw=raw, **options)

        def show() -> None:
            stream = client.generate(request, timeout_s=timeout)
            events = interruptible(stream)
            if as_json:
                for event in events:
                    print_message(event)
            else:
                print_text(events, served.num_layers, coloured=show_depth)
            say_inexact(stream)

        try:
            show()
        except NeapError as error:
            # Plain text would lose the system message, so with --system the error is shown instead.
            if error.reason != NO_CHAT_TEMPLATE or system:
                raise
            err.print(PLAIN_TEXT_NOTE, markup=False, style="dim")
            set_prompt(request, text, raw=True)
            show()


def print_text(
    events: Iterator[pb.GenerateResponse], num_layers: int, *, coloured: bool, with_statistics: bool = True
) -> None:
    """Stream the text to standard output. Reasoning, the legend and the statistics go to standard error."""
    view = DepthView(out, num_layers, coloured)
    finished: pb.Finished | None = None
    started: pb.Started | None = None
    for event in events:
        if reasoning := event.chunk.reasoning + event.finished.reasoning:
            err.print(Text(reasoning, style="dim"), end="")
        view.show(event)
        if event.HasField("started"):
            started = event.started
            for warning in started.warnings:
                say(warning)
        elif event.HasField("finished"):
            finished = event.finished
    out.print()
    if coloured:
        err.print(view.legend())
    if not with_statistics:
        return
    if finished is not None:
        err.print(statistics_line(finished), markup=False, style="dim")
    if started is not None and finished is not None and started.lossy:
        num_other = finished.depth.num_relaxed
        say(f"{started.policy} is lossy: {num_other} tokens are not the full model's own choice")


def say_inexact(stream: GenerationStream) -> None:
    """Say on standard error where the answer went on at a worker whose tokens may be others."""
    for resumption in stream.resumptions:
        if resumption.continued_inexactly:
            say(f"after {resumption.num_resumed_tokens} tokens another worker went on, whose tokens may be others")


def served_model(client: NeapClient, model_id: str) -> pb.Model:
    """Return the model by name, or the worker's only model.
    Raises NotFound, or InvalidInput if `model_id` is needed."""
    if model_id:
        return client.get_model(model_id)
    models = client.list_models()
    if len(models) != 1:
        names = ", ".join(model.model_id for model in models) or "none"
        raise InvalidInput(f"the worker serves {names}; choose a model with --model")
    return models[0]


def statistics_line(finished: pb.Finished) -> str:
    """Summarise one generation in one line."""
    usage, depth = finished.usage, finished.depth
    decode_s = seconds(finished.timing.decode)
    rate = (usage.num_completion_tokens - 1) / decode_s if decode_s > 0 else 0.0
    reason = pb.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower()
    return (
        f"{usage.num_prompt_tokens} + {usage.num_completion_tokens} tokens ({reason}), {rate:.1f} tokens/s, "
        f"first token after {seconds(finished.timing.queue) + seconds(finished.timing.prefill):.2f} s, "
        f"{depth.mean_layers_per_token:.1f} layer executions per token, "
        f"{depth.num_accepted}/{depth.num_drafted} drafts accepted"
    )


def seconds(duration: Duration) -> float:
    return float(duration.seconds) + duration.nanos / 1e9
