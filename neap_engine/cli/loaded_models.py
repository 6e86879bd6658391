"""`neap ps` and `neap models list`: the models that a worker serves, and what it does now."""

from typing import Annotated

import typer
from neap_client.inference.v1 import inference_pb2 as pb
from rich.table import Table

from neap_engine.cli.connection import calls_service, connect
from neap_engine.cli.console import DEFAULT_WORKER, Worker, out, table_cell
from neap_engine.cli.json_lines import print_message

AsJson = Annotated[bool, typer.Option("--json", help="Print each model as one line of JSON.")]


@calls_service
def ps(worker: Worker = DEFAULT_WORKER, as_json: AsJson = False) -> None:
    """Show what a worker does: per model the requests that run and wait, the reserved share of its KV budget, and the
    loaded routers.

    If the address names several workers, one of them answers.
    """
    models = listed(worker, as_json)
    table = Table("model", "running", "waiting", "KV reserved", "routers loaded")
    for model in models:
        table.add_row(
            table_cell(model.model_id),
            str(model.load.num_running),
            str(model.load.num_waiting),
            f"{model.load.kv_usage_ratio:.0%}",
            table_cell(" ".join(str(router.version) for router in model.routers)),
        )
    if models:
        out.print(table)


@calls_service
def list_models(worker: Worker = DEFAULT_WORKER, as_json: AsJson = False) -> None:
    """List the models that a worker serves."""
    models = listed(worker, as_json)
    table = Table("model", "architecture", "layers", "context", "vocabulary", "fingerprint")
    for model in models:
        table.add_row(
            table_cell(model.model_id),
            table_cell(model.architecture),
            str(model.num_layers),
            str(model.context_length),
            str(model.vocabulary_size),
            table_cell(model.fingerprint[:19]),
        )
    if models:
        out.print(table)


def listed(worker: str, as_json: bool) -> list[pb.Model]:
    """Return the models, or print them as JSON and return none."""
    with connect(worker) as client:
        models = client.list_models()
    if not as_json:
        return models
    for model in models:
        print_message(model)
    return []
