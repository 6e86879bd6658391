"""Publishes a router: contents first, then one journal record, which names them.

A publication is final with its record and visible with the index (docs/decisions/018). If a publisher dies in between,
the next client applies its record.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.digests import digest_of
from shared.files import StepHook
from shared.registry.alias_moves import AliasMove
from shared.registry.content_store import ContentStore
from shared.registry.contents import hexadecimal_of, other_contents_error
from shared.registry.encoding import open_sealed, seal
from shared.registry.index import ModelState
from shared.registry.index_keeper import IndexKeeper
from shared.registry.journal import JournalEntry, VersionRecord
from shared.registry.marks import Mark, publishing
from shared.registry.store import Store


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
        with publishing(self._store) as mark:
            self._keeper.state(new.model_id)
            done = self._find(new)
            # Also for a version that an earlier attempt has recorded, perhaps so late that its contents were swept.
            self._put(new)
            if done is None:
                self._claim(new)
                self._step("claimed")
                committed = self._keeper.commit(new.model_id, lambda state: self._propose(new, state, mark))
                done = committed.published if isinstance(committed, JournalEntry) else committed
                assert done is not None
            else:
                self._keeper.sync(new.model_id)
            mark.check_if_late()
            return done

    def _propose(self, new: Publication, state: ModelState, mark: Mark) -> VersionRecord | JournalEntry:
        done = self._find(new)
        if done is not None:
            return done
        mark.check()
        return new.record(state)

    def _put(self, new: Publication) -> None:
        for name in sorted(new.blobs):
            self._contents.put("blobs", new.blobs[name])
        self._contents.put("manifests", new.manifest)

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
        path = f"requests/{hexadecimal_of(digest_of(new.request_id.encode()))}.json"
        if self._store.create(path, seal({"request_id": new.request_id, "model_id": new.model_id})):
            return
        owner = str(open_sealed(self._store.get(path) or b"", path)["model_id"])
        if owner != new.model_id:
            self._keeper.state(owner, is_fresh=True)
            number = self._keeper.version_of_request(owner, new.request_id)
            raise other_contents_error(new.request_id, owner, number)
