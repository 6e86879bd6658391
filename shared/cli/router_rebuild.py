"""`neap routers rebuild-index`: rebuilds a registry's index from its journal, in Redis or in a folder's index.db."""

from typing import Annotated

import typer

from shared.cli.console import exit_on_error, print_line
from shared.cli.shared_registry import RegistryUrl, rebuilt


@exit_on_error
def rebuild_index(
    registry: RegistryUrl = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Rebuild only this model. May be given several times; not allowed for a folder. "
            "Default: all models.",
        ),
    ] = None,
) -> None:
    """Rebuild versions, aliases and their history from the registry's journal.

    The command may be repeated and may run while the services run. Exception: if a folder's index.db is missing or cannot be
    read, stop the services first.
    """
    for model_id, state in rebuilt(registry, model or ()):
        print_line(
            f"{model_id}: {state.num_versions} versions, {len(state.aliases)} aliases,"
            f" {state.num_events} events"
        )
