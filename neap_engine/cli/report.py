"""`neap report`: measures a published router on a worker and writes a PNG."""

import json
from pathlib import Path
from typing import Annotated

import typer

from neap_engine.cli import charts
from neap_engine.cli.compare import FULL, Side, compare
from neap_engine.cli.connection import calls_service, connect
from neap_engine.cli.console import DEFAULT_CALIBRATOR, DEFAULT_WORKER, Calibrator, Model, Worker, out
from neap_engine.cli.learned_view import print_learned
from neap_engine.cli.measure import PROMPTS, policy_table
from neap_engine.cli.risk_view import print_risk
from neap_engine.cli.routers import selector


@calls_service
def report(
    model: Model,
    calibrator: Calibrator = DEFAULT_CALIBRATOR,
    worker: Worker = DEFAULT_WORKER,
    router: Annotated[
        str, typer.Option("--router", help="Router to measure: a version number or an alias.")
    ] = "latest",
    output: Annotated[Path, typer.Option("--output", help="PNG file to write.")] = Path("neap-report.png"),
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Maximum number of new tokens per prompt.")
    ] = 64,
) -> None:
    """Run four prompts under the policies full and exact, print a table and write a picture.

    The picture shows exits per depth, the routers' reliability on held-out tokens, and tokens per second by policy.
    """
    with connect(calibrator) as catalogue, connect(worker) as inference:
        version = catalogue.get_version(model, **selector(router))
        num_layers = inference.get_model(model).num_layers
        sides = (FULL, Side("exact", "exact", str(version.version)))
        figures = compare(inference, model, sides, PROMPTS, max_tokens)
    out.print(policy_table(figures))
    manifest = json.loads(version.manifest_json)
    print_learned(manifest)
    print_risk(manifest)
    picture = charts.write_report(
        output,
        title=f"{model}, router version {version.version}",
        num_layers=num_layers,
        figures=figures,
        manifest_json=version.manifest_json,
    )
    out.print(f"wrote {picture}", markup=False)
