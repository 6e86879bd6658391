"""`neap evaluate`: neap beside simpler ways to go faster, on one's own prompts.
The measuring runs in processes of its own."""

from pathlib import Path
from typing import Annotated

import typer

from neap_engine.cli.console import DataDir, RegistryUrl, exit_on_error, out, print_line
from neap_engine.cli.evaluate_view import doubts, draw_sides, evaluation_table, notes, write_csv
from neap_engine.cli.tune import Model, Prompts, Rounds, Router, measure, measuring_command, variables

DEFAULT_MARGINS = (0.1, 0.5)


@exit_on_error
def evaluate(
    prompts: Prompts,
    model: Model,
    router: Router = "latest",
    margin: Annotated[
        list[float] | None,
        typer.Option(
            "--margin",
            help="Margin of the policy relaxed. May be given several times. "
            f"Default: {', '.join(f'{value:g}' for value in DEFAULT_MARGINS)}.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Maximum number of new tokens per answer.")
    ] = 128,
    rounds: Rounds = 1,
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
    table: Annotated[Path, typer.Option("--csv", help="CSV file to write.")] = Path("neap-evaluate.csv"),
    output: Annotated[Path, typer.Option("--output", help="PNG file to write.")] = Path("neap-evaluate.png"),
) -> None:
    """Answer your own prompts with neap and with simpler ways to go faster, and compare quality and speed.

    The sides: the policies full, exact and relaxed; transformers' generate, alone, with prompt lookup and with early
    exit; and TIDE's published method. A prompt may have an "answer", whose last number is then compared. Answers are
    greedy, one at a time, on this machine. Memory for two copies of the model is needed. The settings of a worker that
    say how a model is loaded are read, NEAP_COMPUTE_DTYPE for example.
    """
    margins = DEFAULT_MARGINS if margin is None else margin
    command = measuring_command(prompts, model, router, max_tokens, rounds, (), margins)
    report = measure(command, variables(registry, data_dir))
    run, rows = report["run"], report["rows"]
    out.print(evaluation_table(run, rows))
    for line in [*notes(rows), *doubts(rows)]:
        print_line(line)
    for path in (write_csv(table, rows), draw_sides(output, run, rows)):
        out.print(f"wrote {path}", markup=False)
