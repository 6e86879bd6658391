"""`neap routers sweep`: removes from a shared registry's bucket what publications that never ended have left."""

from typing import Annotated

import typer

from shared.cli.console import guarded, out
from shared.cli.shared_registry import RegistryUrl, opened_shared_registry


@guarded
def sweep(
    registry: RegistryUrl = None,
    grace_hours: Annotated[
        float, typer.Option("--grace-hours", min=0, help="What was written later stays.")
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; count.")] = False,
) -> None:
    """Remove contents that no publication names. Safe while the services run; publications wait for its end, minutes."""
    with opened_shared_registry(registry, "sweeps by itself") as opened:
        done = opened.sweep(grace_s=grace_hours * 3600, is_rehearsal=dry_run)
    out.print(
        f"{done.num_named} objects named, {done.num_removed} unnamed ({done.num_removed_bytes} bytes)"
        f" {'to remove' if dry_run else 'removed'}, {done.num_young} unnamed but in grace",
        markup=False,
    )
    if done.num_damaged:
        out.print(
            f"{done.num_damaged} manifests are damaged, so {done.num_kept} unnamed blobs were kept: `neap routers list` shows"
            " which versions, publishing their contents again mends them",
            markup=False,
        )
