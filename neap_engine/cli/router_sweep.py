"""`neap routers sweep`: removes objects of unfinished publications from a registry."""

from typing import Annotated

import typer

from neap_engine.cli.console import RegistryUrl, exit_on_error, out
from neap_engine.cli.router_files import opened_registry


@exit_on_error
def sweep(
    registry: RegistryUrl = None,
    grace_hours: Annotated[
        float, typer.Option("--grace-hours", min=0, help="Keep objects written within this many hours.")
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only count.")] = False,
) -> None:
    """Remove objects that no publication refers to from a registry's bucket or folder.

    The command may run while the services run. Publications wait until it ends, which can take minutes for a bucket.
    """
    with opened_registry(registry, None) as opened:
        done = opened.sweep(grace_s=grace_hours * 3600, is_rehearsal=dry_run)
    out.print(
        f"{done.num_in_use} objects in use, {done.num_removed} unused ({done.num_removed_bytes} bytes)"
        f" {'to remove' if dry_run else 'removed'}, {done.num_in_grace_period} unused but within the grace period",
        markup=False,
    )
    if done.num_damaged:
        out.print(
            f"{done.num_damaged} manifests are damaged, so {done.num_kept} blobs that may belong to them were kept."
            " `neap routers list` shows the damaged versions; publishing their contents again repairs them.",
            markup=False,
        )
