"""`neap routers rebuild-index`: rebuilds a registry's index in Redis from its journal."""

from typing import Annotated

import typer

from neap_engine.cli.console import RegistryUrl, exit_on_error, print_line
from neap_engine.cli.router_files import opened_registry


@exit_on_error
def rebuild_index(
    registry: RegistryUrl = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="Rebuild only this model. May be given several times. Default: all models."),
    ] = None,
) -> None:
    """Rebuild versions, aliases and their history in Redis from the registry's journal.

    The command may be repeated and may run while the services run. Registries without Redis have no index to rebuild.
    """
    with opened_registry(registry, None) as opened:
        for model_id in model or opened.models():
            state = opened.rebuild(model_id)
            print_line(
                f"{model_id}: {state.num_versions} versions, {len(state.aliases)} aliases, {state.num_events} events"
            )
