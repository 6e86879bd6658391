"""`neap serve`: replaces itself with one of the services or the gateway.
All flags after the name, `--help` included, go to the service."""

import os
import sys

import typer

from neap_engine.cli.console import exit_on_error

app = typer.Typer(help="Run one of the two services or the HTTP gateway in this process.", no_args_is_help=True)

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("calibrator", context_settings=PASS_THROUGH, add_help_option=False)
@exit_on_error
def calibrator(context: typer.Context) -> None:
    """Run the calibration service and the router catalogue. `neap serve calibrator --help` lists its flags."""
    exec_service("calibrator_service", context.args)


@app.command("worker", context_settings=PASS_THROUGH, add_help_option=False)
@exit_on_error
def worker(context: typer.Context) -> None:
    """Run an inference worker. `neap serve worker --help` lists its flags."""
    exec_service("inference_service", context.args)


@app.command("gateway", context_settings=PASS_THROUGH, add_help_option=False)
@exit_on_error
def gateway(context: typer.Context) -> None:
    """Run the HTTP gateway with OpenAI's API. `neap serve gateway --help` lists its flags."""
    exec_service("neap_engine.gateway", context.args)


def exec_service(module: str, arguments: list[str]) -> None:
    """Replace this process with the service, so that signals reach it directly. Does not return."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
