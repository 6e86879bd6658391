"""Removes contents that no record names, which publications that never ended have left behind.

A sweep is maintenance: while it runs nothing can be published (see marks.py), and all else goes on. It may be killed at
any point and repeated: each removal is of an object that no record names, whatever was removed before.
"""

import json
import re
from dataclasses import dataclass

import structlog

from shared.errors import Corrupt, InvalidInput
from shared.files import StepHook
from shared.registry.content_store import ContentStore
from shared.registry.contents import hexadecimal_of
from shared.registry.journal import Journal
from shared.registry.marks import sweeping
from shared.registry.store import Store

# What may be removed: the folders of `shared/registry/store.py`, and the names that neap gives there.
PARTS, MANIFESTS, BLOBS = "parts", "manifests/sha256", "blobs/sha256"
_NAME = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
GRACE_S = PART_S = 24 * 3600.0

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
    step: StepHook = lambda name: None,
) -> Sweep:
    """Remove blobs and manifests that no journal names and that were last written more than `grace_s` seconds ago by
    the store's clock, and what killed processes had begun to write into a folder more than a day ago.

    If a manifest is damaged, no blob is removed, because its blobs are unknown. Raises InvalidInput, Unavailable
    (PUBLICATION_RUNNING; SWEEP_TOO_SLOW: the rest is left to the next sweep), and Corrupt if a journal cannot be read,
    in which case nothing is removed.

    `step` is called with the name of each step, for fault injection in tests.
    """
    if grace_s < 0:
        raise InvalidInput(f"the grace period is {grace_s} s; it must not be negative")
    with sweeping(store) as mark:
        step("sweep:marked")
        now_s = mark.now_s()
        in_use, num_damaged = _names_in_use(store)
        step("sweep:read")
        num_removed = num_bytes = num_in_grace_period = num_kept = 0
        for folder, names in in_use.items():
            keep_s = PART_S if folder == PARTS else grace_s
            for found in store.objects(folder):
                if found.name in names or not _NAME.fullmatch(found.name):
                    continue
                if now_s - found.last_modified_s < keep_s:
                    num_in_grace_period += 1
                    continue
                if folder == BLOBS and num_damaged:
                    num_kept += 1
                    continue
                if not is_rehearsal:
                    mark.check()
                    store.remove(found.path)
                    log.info("unused object removed", path=found.path)
                    step("sweep:removed")
                num_removed += 1
                num_bytes += found.size_bytes
    num_in_use = sum(map(len, in_use.values()))
    return Sweep(num_in_use, num_removed, num_bytes, num_in_grace_period, num_damaged, num_kept)


def _names_in_use(store: Store) -> tuple[dict[str, set[str]], int]:
    """Return the names of the objects in use by folder, and how many manifests are damaged."""
    journal, contents = Journal(store), ContentStore(store)
    manifests: set[str] = set()
    for model_id in journal.models():
        entries = journal.after(model_id, 0)
        manifests |= {e.published.manifest_digest for e in entries if e.published is not None}
    blobs: set[str] = set()
    num_damaged = 0
    for digest in sorted(manifests):
        try:
            manifest = json.loads(contents.read_manifest(digest))
        except Corrupt as error:
            log.error("a manifest is damaged: no blob is removed", problem=error.message)
            num_damaged += 1
            continue
        blobs |= {str(entry["digest"]) for entry in manifest["blobs"].values()}
    return {
        PARTS: set(),
        MANIFESTS: set(map(hexadecimal_of, manifests)),
        BLOBS: set(map(hexadecimal_of, blobs)),
    }, num_damaged
