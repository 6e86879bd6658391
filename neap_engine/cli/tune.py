"""`neap tune`: quality and speed of the depth policies on one's own prompts.
The measuring runs in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from neap_engine.cli.console import DataDir, RegistryUrl, err, exit_on_error, out, print_line
from neap_engine.cli.evaluate_view import doubts, draw_policies, policy_sweep_table
from neap_engine.cli.registry_commands import registry_there
from shared.errors import NeapError, NotFound, Unavailable

MODULE = "neap_engine.evaluate"
# Measured if neither thresholds nor margins are given.
DEFAULT_THRESHOLDS = (0.99, 0.97, 0.95, 0.9, 0.85, 0.7)
DEFAULT_MARGINS = (0.1, 0.3, 1.0)

Prompts = Annotated[
    Path,
    typer.Argument(
        help='JSONL file of prompts. A line is {"prompt": "text to continue"} or {"messages": [{"role": .., "content": '
        "..}]}."
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="ID=SOURCE",
        help="Id of the model in the registry, and its source, as for `neap serve worker`.",
    ),
]
Rounds = Annotated[
    int,
    typer.Option("--rounds", min=1, help="How many times each prompt is answered. The least of its times counts."),
]
Router = Annotated[str, typer.Option("--router", help="Router to measure: a version number or an alias.")]


@exit_on_error
def tune(
    prompts: Prompts,
    model: Model,
    router: Router = "latest",
    threshold: Annotated[
        list[float] | None,
        typer.Option(
            "--threshold",
            help="Threshold of the policy relaxed, above 0 and up to 1. May be given several times. "
            f"Without --margin, too: {', '.join(f'{value:g}' for value in DEFAULT_THRESHOLDS)}.",
        ),
    ] = None,
    margin: Annotated[
        list[float] | None,
        typer.Option(
            "--margin",
            help="Margin of the policy relaxed, 0 or more. May be given several times. "
            f"Without --threshold, too: {', '.join(f'{value:g}' for value in DEFAULT_MARGINS)}.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=9, help="Maximum number of new tokens per answer.")
    ] = 128,
    rounds: Rounds = 3,
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
    results: Annotated[
        Path, typer.Option("--results", help="JSONL file of all answers. If it exists, the sweep continues from it.")
    ] = Path("neap-tune.jsonl"),
    output: Annotated[Path, typer.Option("--output", help="PNG file to write.")] = Path("neap-tune.png"),
) -> None:
    """Answer your own prompts under the policies full, exact and relaxed, and show what each does to answers and to
    speed.

    Answers are greedy, one at a time, in this process' machine and not on a worker. An interrupted sweep continues if
    the same command is given again. The settings of a worker that say how a model is loaded are read,
    NEAP_COMPUTE_DTYPE for example.
    """
    thresholds, margins = threshold or [], margin or []
    if not thresholds and not margins:
        thresholds, margins = [*DEFAULT_THRESHOLDS], [*DEFAULT_MARGINS]
    command = measuring_command(prompts, model, router, max_tokens, rounds, thresholds, margins)
    command += ["--results", str(results)]
    try:
        report = measure(command, variables(registry, data_dir))
    except KeyboardInterrupt:
        err.print(f"interrupted; the same command continues from {results}", markup=False)
        raise typer.Exit(130) from None
    run, rows = report["run"], report["rows"]
    out.print(policy_sweep_table(run, rows))
    for line in doubts(rows):
        print_line(line)
    out.print(f"wrote {draw_policies(output, run, rows)}", markup=False)


def measuring_command(
    prompts: Path,
    model: str,
    router: str,
    max_tokens: int,
    rounds: int,
    thresholds: Sequence[float],
    margins: Sequence[float],
) -> list[str]:
    if not prompts.is_file():  # before a model is loaded
        raise NotFound(f"there is no file {prompts}", reason="PROMPT_FILE_NOT_FOUND")
    command = [sys.executable, "-m", MODULE, "--model", model, "--router", router]
    command += ["--prompts", str(prompts), "--max-tokens", str(max_tokens), "--rounds", str(rounds)]
    for flag, values in (("--threshold", thresholds), ("--margin", margins)):
        for value in values:
            command += [flag, str(value)]
    return command


def variables(registry: str | None, data_dir: Path | None) -> dict[str, str]:
    """The measuring process' registry, as variables: a URL may hold a password, which flags would show in process
    lists. Raises as `registry_there`."""
    settings = {"NEAP_REGISTRY": registry_there(registry, data_dir), "NEAP_DATA_DIR": data_dir}
    return {name: str(value) for name, value in settings.items() if value is not None}


def measure(command: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """Runs the measuring process and shows its progress. Returns its report. Raises the error that it reports, and
    `Unavailable` if it ends without a report. SIGTERM acts like Ctrl-C meanwhile: otherwise the process would go on
    without this one."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _measured(command, variables)
    finally:
        signal.signal(signal.SIGTERM, before)


def _measured(command: list[str], variables: dict[str, str]) -> dict[str, Any]:
    columns = (TextColumn("measuring"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    error: NeapError | None = None
    report: dict[str, Any] | None = None
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}) as process,
        Progress(*columns, console=out, disable=not out.is_terminal) as progress,
    ):
        task = progress.add_task("measuring", total=None)
        last_tenths = -1
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = json.loads(line)
                if "error" in event:
                    error = NeapError(event["error"], reason=event["reason"])
                    continue
                if "report" in event:
                    report = event["report"]
                    continue
                measured, total = int(event["measured"]), int(event["total"])
                progress.update(task, completed=measured, total=total)
                tenths = 10 * measured // total
                if not out.is_terminal and tenths > last_tenths:
                    print_line(f"   {measured} of {total} answers")
                last_tenths = tenths
        except BaseException:
            process.terminate()
            raise
    if error is not None:
        raise error
    if process.returncode or report is None:
        raise Unavailable(
            f"the measuring process ended with code {process.returncode}, without a report", reason="MEASURING_ENDED"
        )
    return report
