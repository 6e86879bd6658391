"""`neap routers sweep`: removes from a shared registry's bucket what publications that never ended have left."""

from typing import Annotated

import typer

from shared.cli.console import guarded, out
from shared.config import ServiceSettings, make_settings
from shared.errors import InvalidInput


@guarded
def sweep(
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry",
            metavar="URL",
            help="The services' registry; better in NEAP_REGISTRY where it holds a password.",
        ),
    ] = None,
    grace_hours: Annotated[
        float, typer.Option("--grace-hours", min=0, help="What was written later stays.")
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; count.")] = False,
) -> None:
    """Remove contents that no publication names. Safe while the services run; publications wait for its end, minutes."""
    from shared.registry.factory import open_registry
    from shared.registry.shared import SharedRegistry
    from shared.rpc.logs import configure_logging

    given = {} if registry is None else {"registry": registry}
    configure_logging("warning")  # to standard error
    opened = open_registry(make_settings(ServiceSettings, **given).registry)
    try:
        if not isinstance(opened, SharedRegistry):
            raise InvalidInput(
                "the embedded registry sweeps by itself: this is for redis://",
                reason="BAD_REGISTRY",
            )
        done = opened.sweep(grace_s=grace_hours * 3600, is_rehearsal=dry_run)
    finally:
        opened.close()
    out.print(
        f"{done.num_named} objects named, {done.num_removed} unnamed ({done.num_removed_bytes} bytes)"
        f" {'to remove' if dry_run else 'removed'}, {done.num_young} unnamed but in grace",
        markup=False,
    )
