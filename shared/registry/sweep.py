"""Removing from a bucket what no record names: contents of publications that never ended.

A publisher may be about to name contents that lie there unnamed, so a sweep holds a lease which publishers look for after they have
stored and before they record (docs/decisions/009). Whoever looked before the lease was there records within COMMIT_S or not
at all; the sweep waits that long before it reads the journals.
"""

import json
from dataclasses import dataclass

import structlog

from shared.errors import Corrupt, InvalidInput
from shared.registry.blobs import Kind
from shared.registry.journal import Journal
from shared.registry.lease import DEAD_S, Lease
from shared.registry.object_store import ObjectStore
from shared.timeouts import COMMIT_S

GRACE_S = 24 * 3600.0
# The last request of a publisher may take this much longer than COMMIT_S.
REQUEST_MARGIN_S = 30.0

log = structlog.get_logger("neap.registry")


@dataclass(frozen=True)
class Sweep:
    """What was found, and removed unless it was a rehearsal. `num_young`: unnamed, but in grace. `num_kept`: unnamed and old, but
    perhaps named by a manifest that cannot be read, of which there are `num_damaged`."""

    num_named: int
    num_removed: int
    num_removed_bytes: int
    num_young: int
    num_damaged: int = 0
    num_kept: int = 0


def sweep(
    objects: ObjectStore,
    *,
    grace_s: float = GRACE_S,
    is_rehearsal: bool = False,
    settle_s: float | None = None,
    dead_s: float = DEAD_S,
) -> Sweep:
    """Removes blobs and manifests that no journal names and that were last written more than `grace_s` ago, by the store's clock.

    Where a manifest is damaged it is not known which blobs it names: no blob is removed then. Raises InvalidInput, Conflict
    (SWEEP_RUNNING), Unavailable, and Corrupt where a journal cannot be read: nothing is removed then.
    """
    if grace_s < 0:
        raise InvalidInput(f"the grace is {grace_s} s; it must not be negative")
    with Lease(objects).held(dead_s=dead_s) as lease:
        lease.wait(COMMIT_S + REQUEST_MARGIN_S if settle_s is None else settle_s)
        named, num_damaged = _named(objects, lease)
        now_s = objects.last_modified_s(lease.path)
        num_removed = num_bytes = num_young = num_kept = 0
        kinds: tuple[Kind, ...] = ("manifests", "blobs")
        for kind in kinds:
            for content in objects.contents(kind):
                if content.digest in named[kind]:
                    continue
                if now_s - content.last_modified_s < grace_s:
                    num_young += 1
                    continue
                if kind == "blobs" and num_damaged:
                    num_kept += 1
                    continue
                if not is_rehearsal:
                    lease.renew()
                    objects.remove_content(kind, content.digest)
                    log.info("unnamed content removed", kind=kind, digest=content.digest)
                num_removed += 1
                num_bytes += content.size_bytes
    num_named = sum(map(len, named.values()))
    return Sweep(num_named, num_removed, num_bytes, num_young, num_damaged, num_kept)


def _named(objects: ObjectStore, lease: Lease) -> tuple[dict[Kind, set[str]], int]:
    """Digests that the journals name, and how many of the manifests among them are damaged."""
    journal = Journal(objects)
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
            manifest = json.loads(objects.read_manifest(digest))
        except Corrupt as error:
            log.error("a manifest is damaged: no blob is removed", problem=error.message)
            num_damaged += 1
            continue
        blobs |= {str(entry["digest"]) for entry in manifest["blobs"].values()}
    return {"manifests": manifests, "blobs": blobs}, num_damaged
