"""Removes contents that no record names, which unfinished publications left behind.

A publisher may be about to record contents that no record names yet. In a folder, a sweep therefore waits for the
publishers and keeps new ones waiting. In a bucket it holds a lease, for which publishers check after storing contents
and before writing their record (docs/decisions/018). A publisher that checked before the lease existed writes its
record within COMMIT_S, and the sweep waits that long before it reads the journals. A publisher that was later checks
again before it answers. A sweep that outlives its lease cannot remove anything (docs/decisions/018).
"""

import json
from dataclasses import dataclass

import structlog

from shared.digests import DIGEST_PATTERN, PREFIX
from shared.errors import Corrupt, InvalidInput
from shared.registry.content_store import ContentStore
from shared.registry.contents import Kind, content_path
from shared.registry.journal import Journal
from shared.registry.lease import DEAD_S
from shared.registry.store import Store, SweepLease
from shared.timeouts import COMMIT_S

GRACE_S = 24 * 3600.0
# The last request of a publisher may end this many seconds after COMMIT_S.
REQUEST_MARGIN_S = 30.0

log = structlog.get_logger("neap.registry")


@dataclass(frozen=True)
class Sweep:
    """The result of a sweep. In a rehearsal nothing was removed.

    `num_in_use` objects are in use. `num_in_grace_period` are unused but within the grace period. `num_kept` are unused
    and old, but may belong to one of the `num_damaged` manifests that cannot be read.
    """

    num_in_use: int
    num_removed: int
    num_removed_bytes: int
    num_in_grace_period: int
    num_damaged: int = 0
    num_kept: int = 0


def sweep(
    store: Store,
    *,
    grace_s: float = GRACE_S,
    is_rehearsal: bool = False,
    settle_s: float | None = None,
    dead_s: float = DEAD_S,
) -> Sweep:
    """Remove blobs and manifests that no journal names and that were last written more than `grace_s` seconds ago by
    the store's clock.

    If a manifest is damaged, no blob is removed, because its blobs are unknown. Raises InvalidInput, Conflict
    (SWEEP_RUNNING), Unavailable (also LOCKED: publishers of a folder did not end in time), and Corrupt if a journal
    cannot be read, in which case nothing is removed.
    """
    if grace_s < 0:
        raise InvalidInput(f"the grace period is {grace_s} s; it must not be negative")
    with store.sweeping(dead_s=dead_s) as lease:
        lease.wait(COMMIT_S + REQUEST_MARGIN_S if settle_s is None else settle_s)
        in_use, num_damaged = _digests_in_use(store, lease)
        now_s = lease.now_s()
        num_removed = num_bytes = num_in_grace_period = num_kept = 0
        kinds: tuple[Kind, ...] = ("manifests", "blobs")
        for kind in kinds:
            for content in store.objects(f"{kind}/sha256"):
                ends_at_s = lease.renew()
                digest = PREFIX + content.name
                if not DIGEST_PATTERN.fullmatch(digest) or digest in in_use[kind]:
                    continue
                if now_s - content.last_modified_s < grace_s:
                    num_in_grace_period += 1
                    continue
                if kind == "blobs" and num_damaged:
                    num_kept += 1
                    continue
                if not is_rehearsal:
                    store.remove_before(content_path(kind, digest), ends_at_s)
                    log.info("unused content removed", kind=kind, digest=digest)
                num_removed += 1
                num_bytes += content.size_bytes
    num_in_use = sum(map(len, in_use.values()))
    return Sweep(num_in_use, num_removed, num_bytes, num_in_grace_period, num_damaged, num_kept)


def _digests_in_use(store: Store, lease: SweepLease) -> tuple[dict[Kind, set[str]], int]:
    """Return the digests that the journals name, and how many of their manifests are damaged."""
    journal, contents = Journal(store), ContentStore(store)
    manifests: set[str] = set()
    for model_id in journal.models():
        lease.renew()
        entries = journal.after(model_id, 0)
        manifests |= {e.published.manifest_digest for e in entries if e.published is not None}
    blobs: set[str] = set()
    num_damaged = 0
    for digest in sorted(manifests):
        lease.renew()
        try:
            manifest = json.loads(contents.read_manifest(digest))
        except Corrupt as error:
            log.error("a manifest is damaged: no blob is removed", problem=error.message)
            num_damaged += 1
            continue
        blobs |= {str(entry["digest"]) for entry in manifest["blobs"].values()}
    return {"manifests": manifests, "blobs": blobs}, num_damaged
