"""The registry of routers. Contents are content-addressed and immutable; only aliases change.

A publication stores and reads back the blobs and the manifest, and then writes one journal record, so a reader never
sees an incomplete router. A change of an alias is one journal record. The store (a folder or a bucket) lets one writer
create a record; the index (in memory or in Redis) answers what the journal says (docs/decisions/018).
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shared.errors import Corrupt, InvalidInput
from shared.files import StepHook
from shared.registry.alias_moves import AliasMove
from shared.registry.base import AliasChange, AliasTarget, Canary, PublishedVersion, RegistryEvent
from shared.registry.content_store import ContentStore
from shared.registry.contents import (
    blob_digest,
    blob_size_bytes,
    check_limit,
    check_passed,
    encode_manifest,
    no_alias_error,
    no_version_error,
    version_damaged_error,
)
from shared.registry.encoding import open_sealed, seal
from shared.registry.index import Event, Index, ModelState
from shared.registry.index_keeper import IndexKeeper
from shared.registry.journal import Journal, JournalEntry, VersionRecord
from shared.registry.lease import Lease
from shared.registry.marks import publishing
from shared.registry.names import check_alias, check_model_id, check_publication, unique_aliases
from shared.registry.publication import Publication, VersionPublisher
from shared.registry.store import Store, registry_id
from shared.registry.sweep import GRACE_S, Sweep, sweep

_LARGEST_EVENT = 2**63 - 2

Propose = Callable[[AliasChange | None], AliasChange]


class Registry:
    """All methods block, and all are safe to call from several threads and processes.

    `step` is called with the name of each step of a publication, for fault injection in tests. Raises the errors of the
    store and the index, and PreconditionFailed (SCHEMA_TOO_NEW, SCHEMA_TOO_OLD,
    NO_CONDITIONAL_WRITES).
    """

    def __init__(self, store: Store, index: Index, *, step: StepHook = lambda name: None) -> None:
        self._store = store
        self._index = index
        self._step = step
        try:
            index.open(registry_id(store))
        except BaseException:
            index.close()
            raise
        self._contents = ContentStore(store, step=step)
        self._keeper = IndexKeeper(index, Journal(store), step=step)
        self._publisher = VersionPublisher(store, self._contents, self._keeper, step=step)

    def publish(
        self,
        model_id: str,
        manifest: Mapping[str, Any],
        blobs: Mapping[str, bytes],
        *,
        request_id: str,
        aliases: Sequence[str] = ("latest",),
        actor: str = "",
    ) -> PublishedVersion:
        """Publish `blobs` (name -> bytes) with `manifest`, which gets {"blobs": {name: {"digest", "size_bytes"}}}.

        Idempotent by `request_id`: a repeated id returns the version it created and moves no alias, or raises
        AlreadyExists if the contents differ. After Unavailable (other than SWEEP_RUNNING) the publication may have
        succeeded; repeat the request to find out. Raises InvalidInput (names, sizes), Exhausted (disk full; nothing
        visible is left behind), Corrupt (reading back failed), PreconditionFailed (CHECKS_FAILED: there are aliases to
        set, and the manifest records a failed check).
        """
        check_publication(model_id, request_id, actor)
        names = unique_aliases(aliases)
        if names:
            check_passed(manifest, "the router to be published")
        encoded = encode_manifest(manifest, blobs)
        new = Publication(model_id, encoded, blobs, request_id, names, actor)
        # The manifest has the same digest, so it is not read again: the publication is final, should the store fail.
        return _version_of(model_id, self._publisher.publish(new), encoded)

    def find_publication(self, model_id: str, request_id: str) -> PublishedVersion | None:
        """Return the version that `publish` made for `request_id`, None if none. A damaged one has `damage` set."""
        state = self._state(model_id, is_fresh=True)
        number = self._keeper.version_of_request(model_id, request_id)
        return None if number is None else self._listed(model_id, number, state)

    def get(self, model_id: str, version: int) -> PublishedVersion:
        """Return one version. Raises NotFound, Corrupt (its manifest is damaged)."""
        return self._version(model_id, self._record(model_id, version, self._state(model_id)))

    def resolve(self, model_id: str, alias: str) -> PublishedVersion:
        """Return the version that an alias names, without its canary. Raises NotFound (lists the aliases), Corrupt."""
        state, last = self._last_change(model_id, alias)
        return self._version(model_id, self._record(model_id, last.to_version, state))

    def target(self, model_id: str, alias: str) -> AliasTarget:
        """Return the alias' version and canary, read atomically. A damaged one has `damage` set. Raises NotFound."""
        state, last = self._last_change(model_id, alias)
        return AliasTarget(self._listed(model_id, last.to_version, state), last.canary)

    def list_versions(
        self, model_id: str, *, before: int | None = None, limit: int = 100, max_manifest_bytes: float = math.inf
    ) -> list[PublishedVersion]:
        """List versions, newest first, only those below `before`. Damaged ones have `damage` set. Empty: unknown model.

        `limit` is in [1, 1000]. The list ends early once the manifests read have `max_manifest_bytes` together. Raises
        InvalidInput.
        """
        check_limit(limit)
        newest = self._state(model_id).num_versions
        if before is not None:
            newest = min(newest, before - 1)
        numbers = list(range(newest, max(newest - limit, 0), -1))
        records = self._keeper.records(model_id, numbers)
        versions: list[PublishedVersion] = []
        for record in records:
            encoded, damage = self._read(record)
            versions.append(_version_of(model_id, record, encoded, damage=damage))
            max_manifest_bytes -= len(encoded)
            if max_manifest_bytes <= 0:
                break
        return versions

    def read_blob(self, version: PublishedVersion, name: str) -> bytes:
        """Return a blob. Its digest is checked at every read.

        Raises NotFound, Corrupt with metadata expected_digest and actual_digest.
        """
        digest = blob_digest(version.manifest, name, version.model_id, version.version)
        return self._contents.read("blobs", digest, blob_size_bytes(version.manifest, name))

    def aliases(self, model_id: str) -> dict[str, int]:
        """Return alias -> version, in alphabetical order."""
        known = self._state(model_id).aliases
        return {alias: known[alias].to_version for alias in sorted(known)}

    def canaries(self, model_id: str) -> dict[str, Canary]:
        """Return alias -> canary for the aliases that have one, in alphabetical order."""
        known = self._state(model_id).aliases
        canaries = {alias: known[alias].canary for alias in sorted(known)}
        return {alias: canary for alias, canary in canaries.items() if canary is not None}

    def last_changes(self, model_id: str) -> dict[str, AliasChange]:
        """Return alias -> its last change, in alphabetical order."""
        return dict(sorted(self._state(model_id).aliases.items()))

    def set_alias(
        self,
        model_id: str,
        alias: str,
        version: int,
        *,
        expected_version: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> AliasChange:
        """Point an alias at a version, which ends its canary. Records nothing if the alias already names the version.

        With `expected_version` this is a compare-and-swap; 0 means that the alias must not exist. Raises NotFound,
        Conflict, Corrupt (VERSION_DAMAGED), PreconditionFailed (CHECKS_FAILED: the version records a failed check).
        """
        move = AliasMove(model_id, alias, actor, reason)
        return self._change(move, lambda last: move.to_version(last, version, expected_version), must_pass=True)

    def set_canary(
        self,
        model_id: str,
        alias: str,
        canary: Canary | None,
        *,
        expected_version: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> AliasChange:
        """Begin or change a canary. None ends it, so that all requests get the alias' version again.

        `expected_version` is compared with the alias' version. Raises InvalidInput (BAD_SHARE; BAD_CANARY: the alias
        already names that version), NotFound, Conflict, Corrupt (VERSION_DAMAGED), PreconditionFailed (CHECKS_FAILED;
        NO_CANARY: there is no canary to end).
        """
        move = AliasMove(model_id, alias, actor, reason)
        return self._change(
            move, lambda last: move.with_canary(self._known(move, last), canary, expected_version), must_pass=True
        )

    def promote_canary(
        self, model_id: str, alias: str, *, expected_canary: int | None = None, actor: str = "", reason: str = ""
    ) -> AliasChange:
        """Point an alias at the version of its canary and end the canary.

        Raises NotFound, PreconditionFailed (NO_CANARY), Conflict (CANARY_MOVED), Corrupt (VERSION_DAMAGED).
        """
        move = AliasMove(model_id, alias, actor, reason)
        return self._change(move, lambda last: move.promoted(self._known(move, last), expected_canary))

    def rollback_alias(
        self, model_id: str, alias: str, *, expected_version: int | None = None, actor: str = "", reason: str = ""
    ) -> AliasChange:
        """Undo the last change: end the canary, or else return to the previous version, even if its checks failed.

        Without a canary, a second rollback undoes the first. Raises NotFound, Conflict, PreconditionFailed if there is
        no previous version, Corrupt (VERSION_DAMAGED) if it cannot be read.
        """
        move = AliasMove(model_id, alias, actor, reason)
        return self._change(
            move,
            lambda last: move.rolled_back(
                self._known(move, last), lambda: self.alias_history(model_id, alias), expected_version
            ),
        )

    def _known(self, move: AliasMove, last: AliasChange | None) -> AliasChange:
        if last is None:
            raise no_alias_error(move.model_id, move.alias, self.aliases(move.model_id))
        return last

    def _change(self, move: AliasMove, propose: Propose, *, must_pass: bool = False) -> AliasChange:
        """Record what `propose` makes of the alias' last change (None if there is no such alias), unless it is that
        change itself.

        `propose` is called again if another writer was faster. Raises NotFound, Corrupt (VERSION_DAMAGED) if the alias
        cannot name the version, and with `must_pass` PreconditionFailed (CHECKS_FAILED).
        """

        def entry(state: ModelState) -> JournalEntry | AliasChange:
            last = state.aliases.get(move.alias)
            change = propose(last)
            if change == last:
                return change
            if last is None or change.to_version != last.to_version:
                self._check_named(move.model_id, change.to_version, state, must_pass)
            if change.canary is not None:
                self._check_named(move.model_id, change.canary.version, state, must_pass)
            return JournalEntry(move.model_id, state.applied + 1, (change,))

        committed = self._keeper.commit(move.model_id, entry)
        return committed.changes[0] if isinstance(committed, JournalEntry) else committed

    def _check_named(self, model_id: str, version: int, state: ModelState, must_pass: bool) -> None:
        record = self._record(model_id, version, state)
        try:
            manifest = self._version(model_id, record, is_fresh=True).manifest
        except Corrupt as error:
            raise version_damaged_error(model_id, version, error) from error
        if must_pass:
            check_passed(manifest, f"version {version} of {model_id!r}")

    def alias_history(self, model_id: str, alias: str) -> list[AliasChange]:
        """Return the alias' changes, newest first. Raises NotFound."""
        self._last_change(model_id, alias)
        changes = [what for _, what in self._events(model_id, 0) if isinstance(what, AliasChange)]
        return [change for change in reversed(changes) if change.alias == alias]

    def events(self, model_id: str, *, after_event: int = 0, timeout_s: float = 0.0) -> Iterator[RegistryEvent]:
        """Iterate over the events after `after_event`, in order.
        If there is none yet, wait for the first for up to `timeout_s`.

        Publications of versions damaged since have `damage` set. Numbers count within the model and never change.
        """
        check_model_id(model_id)
        after_event = min(max(after_event, 0), _LARGEST_EVENT)
        give_up_at = time.monotonic() + timeout_s
        while True:
            is_any = False
            for number, what in self._events(model_id, after_event):
                after_event = number
                if what is None:
                    continue
                is_any = True
                if isinstance(what, AliasChange):
                    yield RegistryEvent(number, what)
                else:
                    published = self._listed(model_id, what, self._state(model_id))
                    yield RegistryEvent(number, published)
            remaining_s = give_up_at - time.monotonic()
            if is_any or remaining_s <= 0:
                return
            self._keeper.wait(model_id, after_event, remaining_s)

    def _events(self, model_id: str, after: int) -> Iterator[Event]:
        self._keeper.state(model_id)
        while page := self._keeper.events(model_id, after):
            yield from page
            after = page[-1][0]

    def last_event(self, model_id: str) -> int:
        """Return the number of the newest event, 0 if there is none."""
        return self._state(model_id).num_events

    def check_writable(self) -> None:
        """Write and remove what a publication writes first. Raises what a publication would raise."""
        with publishing(self._store):
            self._index.check_writable()

    def models(self) -> list[str]:
        """List all models with a published router."""
        return self._keeper.models()

    def rebuild(self, model_id: str) -> ModelState:
        """Rebuild a model's index in Redis from its journal. Atomic: readers see the old or the new index.

        Raises Corrupt, NotFound, InvalidInput (BAD_REGISTRY) for an index in memory.
        """
        if not self._index.may_forget:
            raise InvalidInput("a registry without Redis has no index to rebuild", reason="BAD_REGISTRY")
        return self._keeper.rebuild(check_model_id(model_id))

    def sweep(self, *, grace_s: float = GRACE_S, is_rehearsal: bool = False) -> Sweep:
        """See `shared.registry.sweep.sweep`."""
        return sweep(self._store, grace_s=grace_s, is_rehearsal=is_rehearsal, step=self._step)

    def lease(self, name: str) -> Lease:
        """Return the lease `name` of this registry, which this process does not hold yet. Raises InvalidInput."""
        return Lease(self._store, name)

    def note(self, name: str) -> dict[str, Any] | None:
        """Return what `keep_note` kept last. None: nothing. Raises Corrupt, InvalidInput (BAD_ALIAS)."""
        path = _note_path(name)
        data = self._store.get(path)
        return None if data is None else open_sealed(data, path)

    def keep_note(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep `record` under `name` in place of what was kept there. The last one of two writers at once wins.
        Raises InvalidInput (BAD_ALIAS; BAD_MANIFEST: JSON cannot represent it)."""
        self._store.replace(_note_path(name), seal(record))

    def close(self) -> None:
        """Release connections. Idempotent."""
        self._index.close()

    def _state(self, model_id: str, *, is_fresh: bool = False) -> ModelState:
        return self._keeper.state(check_model_id(model_id), is_fresh=is_fresh)

    def _last_change(self, model_id: str, alias: str) -> tuple[ModelState, AliasChange]:
        check_alias(alias)
        state = self._state(model_id)
        if alias not in state.aliases:
            raise no_alias_error(model_id, alias, state.aliases)
        return state, state.aliases[alias]

    def _record(self, model_id: str, version: int, state: ModelState) -> VersionRecord:
        if not 1 <= version <= state.num_versions:
            raise no_version_error(model_id, version)
        (record,) = self._keeper.records(model_id, [version])
        return record

    def _version(self, model_id: str, record: VersionRecord, *, is_fresh: bool = False) -> PublishedVersion:
        encoded = self._contents.read_manifest(record.manifest_digest, is_fresh=is_fresh)
        return _version_of(model_id, record, encoded)

    def _listed(self, model_id: str, version: int, state: ModelState) -> PublishedVersion:
        return self._intact_or_damaged(model_id, self._record(model_id, version, state))

    def _intact_or_damaged(self, model_id: str, record: VersionRecord) -> PublishedVersion:
        encoded, damage = self._read(record)
        return _version_of(model_id, record, encoded, damage=damage)

    def _read(self, record: VersionRecord) -> tuple[bytes, str]:
        """Return a version's manifest, and what is wrong with it."""
        try:
            return self._contents.read_manifest(record.manifest_digest), ""
        except Corrupt as error:
            return b"{}", error.message


def _note_path(name: str) -> str:
    return f"notes/{check_alias(name)}.json"


def _version_of(model_id: str, record: VersionRecord, manifest: bytes, *, damage: str = "") -> PublishedVersion:
    return PublishedVersion(
        model_id,
        record.version,
        record.manifest_digest,
        record.create_time_s,
        record.size_bytes,
        json.loads(manifest),
        damage,
    )
