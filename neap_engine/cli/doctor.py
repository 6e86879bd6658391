"""`neap doctor`: says what this machine can do with the settings of the services, and why not."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from neap_engine.cli.console import DataDir, RegistryUrl, err, exit_on_error, fail, out, print_json
from neap_engine.cli.up import named_source
from shared.config import make_settings
from shared.plain_text import one_line
from shared.worker_settings import WorkerSettings

if TYPE_CHECKING:
    from neap_engine.doctor.finding import Finding

STYLES = {"ok": "green", "off": "yellow", "broken": "bold red"}


@exit_on_error
def doctor(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="[ID=]SOURCE",
            help="Model to load, as the services are told. A file or folder needs no id. May be given several times. "
            "Default: NEAP_MODELS.",
        ),
    ] = None,
    registry: RegistryUrl = None,
    data_dir: DataDir = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Device of the services: cpu or cuda. Default: NEAP_DEVICE, or cpu.")
    ] = None,
    skip_models: Annotated[
        bool,
        typer.Option(
            "--skip-models", help="Load no model, for example beside a service that has them in memory already."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one line of JSON.")] = False,
) -> None:
    """Say what this machine can do with the settings of the services, and why not.

    The settings are those of `neap serve worker`, from the flags and the variables NEAP_... Each thing is tried: a
    kernel runs, a probe is written to the registry and removed, a model is loaded.

    ok: it works. off: it does not, and these settings do not need it. broken: these settings need it. The exit status
    is 1 if anything is broken.
    """
    if model:
        model = ["=".join(named_source(each)) if Path(each).exists() else each for each in model]
    settings = make_settings(WorkerSettings, models=model, registry=registry, data_dir=data_dir, device=device)
    findings = examine(settings, loads_models=not skip_models)
    broken = [finding.name for finding in findings if finding.status == "broken"]
    if as_json:
        print_json({"is_broken": bool(broken), "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        out.print(table(findings))
    if broken:
        fail(f"broken: {', '.join(broken)}")


def examine(settings: WorkerSettings, *, loads_models: bool) -> "list[Finding]":
    """Run all checks. On a terminal, a line on standard error says which one is running."""
    with err.status("importing torch and transformers"):
        # Imported here because this takes seconds, which other commands do not need.
        import transformers

        from neap_engine.doctor.checks import checks
        from shared.rpc.logs import configure_logging

        # A finding says what these would say.
        configure_logging("error")
        transformers.logging.disable_progress_bar()
    findings = []
    for check in checks(settings, loads_models=loads_models):
        with err.status(f"checking {one_line(check.name)}"):
            findings.append(check.finding())
    return findings


def table(findings: "list[Finding]") -> Table:
    shown = Table("", "what", "finding")
    for finding in findings:
        text = Text(one_line(finding.detail))
        if finding.advice:
            text.append(f"\n{one_line(finding.advice)}", style="italic")
        status = Text(finding.status, style=STYLES[finding.status])
        shown.add_row(status, Text(one_line(finding.name)), text)
    return shown
