"""Routers of pools: which aliases may name them, and what they may go on from.

What one pool's answers have taught must not speed up, or slow down, another pool's. A version that has learned from a
pool's traffic says so in its manifest (`"pool"`); the pool of the model's own routers is empty there.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from calibrator_service.calibration.spec import ServedTraffic, Source
from shared.errors import PreconditionFailed
from shared.pool_names import DEFAULT_POOL
from shared.registry.names import alias_in_pool, pool_of_alias

LATEST = "latest"


def pool_of_source(source: Source) -> str:
    """The pool that a router belongs to which learns from `source`; empty: to none."""
    pool = source.pool if isinstance(source, ServedTraffic) else DEFAULT_POOL
    return "" if pool == DEFAULT_POOL else pool


def pool_of_version(manifest: Mapping[str, Any]) -> str:
    return str(manifest.get("pool", ""))


def latest_of(pool: str) -> str:
    """The alias that a calibration of `pool` moves by default."""
    return alias_in_pool(LATEST, pool or DEFAULT_POOL) or LATEST


def check_aliases(aliases: Iterable[str], pool: str) -> None:
    """Raises PreconditionFailed (OTHER_POOL) if one of them is not an alias of `pool`."""
    for alias in aliases:
        if pool and pool_of_alias(alias) != pool:
            raise PreconditionFailed(
                f"alias {alias!r} cannot name a router that has learned from pool {pool!r}; {latest_of(pool)!r} can",
                reason="OTHER_POOL",
                metadata={"alias": alias, "pool": pool},
            )


def check_parent(manifest: Mapping[str, Any], pool: str) -> None:
    """Raises PreconditionFailed (OTHER_POOL) if a router of `pool` may not go on from the one with this manifest."""
    if (parent := pool_of_version(manifest)) not in ("", pool):
        raise PreconditionFailed(
            f"the parent has learned from pool {parent!r}, so only a router of that pool can go on from it",
            reason="OTHER_POOL",
            metadata={"pool": parent},
        )
