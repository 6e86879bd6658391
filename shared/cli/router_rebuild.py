"""`neap routers rebuild-index`: a shared registry's index in Redis anew, from its object store."""

from typing import Annotated

import typer

from shared.cli.console import guarded, say_line
from shared.cli.shared_registry import RegistryUrl, opened_shared_registry


@guarded
def rebuild_index(
    registry: RegistryUrl = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="This model only; may be repeated. Default: all there are."),
    ] = None,
) -> None:
    """Restore versions, aliases and their history in Redis. Safe while the services run, and to repeat."""
    with opened_shared_registry(registry, "has no index apart") as opened:
        for model_id in model or opened.models():
            state = opened.rebuild(model_id)
            say_line(
                f"{model_id}: {state.num_versions} versions, {len(state.aliases)} aliases,"
                f" {state.num_events} events"
            )
