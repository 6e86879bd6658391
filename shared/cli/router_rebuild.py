"""`neap routers rebuild-index`: a registry's index anew from its journal, in Redis or as a folder's index.db."""

from typing import Annotated

import typer

from shared.cli.console import guarded, say_line
from shared.cli.shared_registry import RegistryUrl, rebuilt


@guarded
def rebuild_index(
    registry: RegistryUrl = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="This model only; may be repeated; not for a folder. Default: all there are.",
        ),
    ] = None,
) -> None:
    """Restore versions, aliases and their history from the journal. Safe to repeat, and while the services run, but stop them
    where a folder's index.db is missing or cannot be read."""
    for model_id, state in rebuilt(registry, model or ()):
        say_line(
            f"{model_id}: {state.num_versions} versions, {len(state.aliases)} aliases,"
            f" {state.num_events} events"
        )
