"""Publishes a router: contents first, then one journal record, which names them.

A publication is final with its record and visible with the index (docs/decisions/018). If a publisher dies in between,
the next client applies its record.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.digests import digest_of
from shared.errors import Unavailable
from shared.files import StepHook
from shared.registry.alias_moves import AliasMove
from shared.registry.content_store import ContentStore
from shared.registry.contents import Kind, hexadecimal_of, other_contents_error
from shared.registry.index_keeper import IndexKeeper, elapsed_s
from shared.registry.journal import JournalEntry, VersionRecord
from shared.registry.sealed import open_sealed, seal
from shared.registry.state import ModelState
from shared.registry.store import Store, SweepWatch
from shared.timeouts import SWEEP_WAIT_S

SWEEP_POLL_S = 1.0


@dataclass(frozen=True)
class Publication:
    """What is to be published. `manifest` is encoded and names the blobs."""

    model_id: str
    manifest: bytes
    blobs: Mapping[str, bytes]
    request_id: str
    aliases: Sequence[str]
    actor: str

    @property
    def manifest_digest(self) -> str:
        return digest_of(self.manifest)

    def record(self, state: ModelState) -> JournalEntry:
        """Build the next record of a model in `state`."""
        number, size_bytes = state.num_versions + 1, sum(map(len, self.blobs.values()))
        version = VersionRecord(number, self.manifest_digest, time.time(), size_bytes, self.request_id, self.actor)
        changes = [
            AliasMove(self.model_id, alias, self.actor, "published").change(state.aliases.get(alias), number)
            for alias in self.aliases
        ]
        return JournalEntry(self.model_id, state.applied + 1, tuple(changes), version)


class VersionPublisher:
    def __init__(self, store: Store, contents: ContentStore, keeper: IndexKeeper, *, step: StepHook) -> None:
        self._store = store
        self._contents = contents
        self._keeper = keeper
        self._step = step

    def publish(self, new: Publication) -> VersionRecord:
        """Return the version made, or the one that the same request made before.

        Raises AlreadyExists, Exhausted, Corrupt, Unavailable, after which the publication may have succeeded.
        """
        with self._store.publishing() as sweeps:
            self._keeper.state(new.model_id)
            done, is_sure = self._find(new), False
            if done is None:
                self._put(new)
                self._claim(new)
                self._step("claimed")
                give_up_at = self._restore_swept(new, sweeps)
                committed = self._keeper.commit(
                    new.model_id, lambda state: self._find(new) or new.record(state), give_up_at
                )
                done = committed.published if isinstance(committed, JournalEntry) else committed
                assert done is not None
                is_sure = isinstance(committed, JournalEntry) and elapsed_s() < give_up_at
            else:
                self._keeper.sync(new.model_id)
            if not is_sure:
                # The record was late, or an earlier attempt wrote it, which may have been late and have ended here.
                self._restore_swept(new, sweeps)
            return done

    def _put(self, new: Publication) -> None:
        for name in sorted(new.blobs):
            self._contents.put("blobs", new.blobs[name])
        self._contents.put("manifests", new.manifest)

    def _restore_swept(self, new: Publication, sweeps: SweepWatch) -> float:
        """Wait for a running sweep to end and store again what it removed.

        Returns the time (of `elapsed_s`) until which no other sweep can remove contents that no record names. Raises
        Unavailable (REGISTRY_BUSY) if the sweep takes longer than SWEEP_WAIT_S.
        """
        give_up_at = elapsed_s() + SWEEP_WAIT_S
        contents: list[tuple[Kind, str]] = [("manifests", new.manifest_digest)]
        contents += [("blobs", digest_of(data)) for data in new.blobs.values()]
        while True:
            asked_at = elapsed_s()
            if sweeps.is_held():
                if asked_at >= give_up_at:
                    raise Unavailable(f"a sweep has been running for {SWEEP_WAIT_S:g} s", reason="REGISTRY_BUSY")
                time.sleep(SWEEP_POLL_S)
                continue
            if all(self._contents.has(kind, digest) for kind, digest in contents):
                return asked_at + sweeps.safe_s
            self._put(new)

    def _find(self, new: Publication) -> VersionRecord | None:
        number = self._keeper.version_of_request(new.model_id, new.request_id)
        if number is None:
            return None
        (record,) = self._keeper.records(new.model_id, [number])
        if record.manifest_digest != new.manifest_digest:
            raise other_contents_error(new.request_id, new.model_id, number)
        return record

    def _claim(self, new: Publication) -> None:
        """Assign the request to its model. Raises AlreadyExists if it belongs to another one."""
        # An index cannot search all models for a request, so the store records the model of each request.
        owner = claim(self._store, new.request_id, new.model_id)
        if owner != new.model_id:
            self._keeper.state(owner, is_fresh=True)
            number = self._keeper.version_of_request(owner, new.request_id)
            raise other_contents_error(new.request_id, owner, number)


def claim(store: Store, request_id: str, model_id: str) -> str:
    """Assign `request_id` to `model_id` unless it is already assigned. Returns the model to which it belongs."""
    path = f"requests/{hexadecimal_of(digest_of(request_id.encode()))}.json"
    if store.create(path, seal({"request_id": request_id, "model_id": model_id})):
        return model_id
    return str(open_sealed(store.get(path) or b"", path)["model_id"])
