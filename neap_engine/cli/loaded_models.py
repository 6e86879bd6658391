"""`neap ps`: the models that a worker serves, and what it does now."""

from typing import Annotated

import typer
from rich.table import Table

from neap_engine.cli.connection import calls_service, connect
from neap_engine.cli.console import DEFAULT_WORKER, Worker, out, print_message, table_cell


@calls_service
def ps(
    worker: Worker = DEFAULT_WORKER,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all that is known of each model as one line of JSON.")
    ] = False,
) -> None:
    """Show the models of a worker and what it does: per model its context length, the requests that run and wait, the
    reserved share of its KV budget, and the loaded routers.

    If the address names several workers, one of them answers.
    """
    with connect(worker) as client:
        models = client.list_models()
    if as_json:
        for model in models:
            print_message(model)
        return
    table = Table("model", "context", "running", "waiting", "KV reserved", "routers loaded")
    for model in models:
        table.add_row(
            table_cell(model.model_id),
            str(model.context_length),
            str(model.load.num_running),
            str(model.load.num_waiting),
            f"{model.load.kv_usage_ratio:.0%}",
            table_cell(" ".join(str(router.version) for router in model.routers)),
        )
    if models:
        out.print(table)
