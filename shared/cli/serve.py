"""`neap serve`: becomes one of the services. Flags after the name are the service's own, `--help` included."""

import os
import sys

import typer

from shared.cli.console import guarded

app = typer.Typer(help="Run one of the two services in this process.", no_args_is_help=True)

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("calibrator", context_settings=PASS_THROUGH, add_help_option=False)
@guarded
def calibrator(context: typer.Context) -> None:
    """Calibration jobs and the catalogue of routers (`neap serve calibrator --help` lists its flags)."""
    become("calibrator_service", context.args)


@app.command("worker", context_settings=PASS_THROUGH, add_help_option=False)
@guarded
def worker(context: typer.Context) -> None:
    """Inference (`neap serve worker --help` lists its flags)."""
    become("inference_service", context.args)


def become(module: str, arguments: list[str]) -> None:
    """Replace this process by the service, so that signals reach it directly. Does not return."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
