"""`neap routers rebuild-index`: a shared registry's index in Redis anew, from its object store."""

from typing import Annotated

import typer

from shared.cli.console import guarded, out
from shared.config import ServiceSettings, make_settings
from shared.errors import InvalidInput


@guarded
def rebuild_index(
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry",
            metavar="URL",
            help="The services' registry; better in NEAP_REGISTRY where it holds a password.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="This model only; may be repeated. Default: all there are."),
    ] = None,
) -> None:
    """Restore versions, aliases and their history in Redis. Safe while the services run, and to repeat."""
    from shared.registry.factory import open_registry
    from shared.registry.shared import SharedRegistry
    from shared.rpc.logs import configure_logging

    given = {} if registry is None else {"registry": registry}
    configure_logging("warning")  # to standard error
    opened = open_registry(make_settings(ServiceSettings, **given).registry)
    try:
        if not isinstance(opened, SharedRegistry):
            raise InvalidInput(
                "the embedded registry has no index apart: this is for redis://",
                reason="BAD_REGISTRY",
            )
        for model_id in model or opened.models():
            state = opened.rebuild(model_id)
            out.print(
                f"{model_id}: {state.num_versions} versions, {len(state.aliases)} aliases,"
                f" {state.num_events} events",
                markup=False,
            )
    finally:
        opened.close()
