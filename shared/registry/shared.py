"""The shared registry for several machines: an object store holds all data, and Redis holds an index of it for fast queries.

A publication stores and reads back the blobs and the manifest, writes one journal record, and then updates the index. It is final
with the record and visible with the index (docs/decisions/009). If a publisher dies in between, the next client applies its record.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import structlog

from shared.errors import Unavailable
from shared.registry.address import SharedAddress
from shared.registry.alias_moves import AliasMove
from shared.registry.alias_operations import AliasOperations, Propose
from shared.registry.base import (
    AliasChange,
    AliasTarget,
    Canary,
    PublishedVersion,
    RegistryEvent,
)
from shared.registry.blobs import StepHook
from shared.registry.canonical import digest_of
from shared.registry.contents import (
    Kind,
    blob_digest,
    blob_size_bytes,
    check_limit,
    check_passed,
    encode_manifest,
    no_alias_error,
    no_version_error,
    other_contents_error,
)
from shared.registry.index_keeper import IndexKeeper, elapsed_s
from shared.registry.journal import Entry, Journal, VersionRecord
from shared.registry.lease import LeaseWatch
from shared.registry.names import (
    check_alias,
    check_model_id,
    check_publication,
    unique_aliases,
)
from shared.registry.object_store import ObjectStore
from shared.registry.redis import RedisIndex
from shared.registry.state import ModelState
from shared.registry.sweep import GRACE_S, Sweep, sweep
from shared.registry.version_reader import version_of
from shared.timeouts import COMMIT_S, SWEEP_WAIT_S

SWEEP_POLL_S = 1.0
_LARGEST_EVENT = 2**63 - 1

T = TypeVar("T")
log = structlog.get_logger("neap.registry")


class SharedRegistry(AliasOperations):
    """A `Registry` over Redis and a bucket.

    At most once every `freshness_s` seconds per model, the journal is checked for records that the index lacks because their writer
    died or Redis lost data.

    `step` is called with the name of each step of a publication, for fault injection in tests. Raises Unavailable,
    PreconditionFailed (SCHEMA_TOO_NEW, NO_CONDITIONAL_WRITES).
    """

    def __init__(
        self,
        address: SharedAddress,
        *,
        freshness_s: float = 30.0,
        step: StepHook = lambda name: None,
    ) -> None:
        self._step = step
        self._redis = RedisIndex(address)
        try:
            self._redis.check()
            self._objects = ObjectStore(address, step=step)
            self._redis.set_registry_id(self._objects.registry_id())
        except BaseException:
            self._redis.close()
            raise
        journal = Journal(self._objects)
        self._index = IndexKeeper(self._redis, journal, freshness_s=freshness_s, step=step)

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
        """See `Registry.publish`. A repeated request moves no alias.

        After Unavailable the publication may have succeeded; repeat the request to find out.
        """
        check_publication(model_id, request_id, actor)
        names = unique_aliases(aliases)
        if names:
            check_passed(manifest, "the router to be published")
        encoded = encode_manifest(manifest, blobs)
        digest = digest_of(encoded)
        size_bytes = sum(map(len, blobs.values()))
        self._index.state(model_id)
        done, is_sure = self._find_request(request_id, model_id, digest), False
        if done is None:
            self._store(blobs, encoded)
            self._claim(request_id, model_id)
            self._step("claimed")
            give_up_at = self._restore_swept(blobs, encoded)

            def propose(state: ModelState) -> Entry | VersionRecord:
                found = self._find_request(request_id, model_id, digest)
                if found is not None:
                    return found
                number, now_s = state.num_versions + 1, time.time()
                made = VersionRecord(number, digest, now_s, size_bytes, request_id, actor)
                moves = [
                    AliasMove(model_id, alias, actor, "published").change(
                        state.aliases.get(alias), number
                    )
                    for alias in names
                ]
                return Entry(model_id, state.applied + 1, tuple(moves), made)

            committed = self._index.commit(model_id, propose, give_up_at)
            done = committed.published if isinstance(committed, Entry) else committed
            assert done is not None
            is_sure = isinstance(committed, Entry) and elapsed_s() < give_up_at
        if not is_sure:
            # The record was late, or an earlier attempt wrote it, which may have been late and have ended here.
            self._restore_swept(blobs, encoded)
        # The manifest has the same digest, so it is not read again: the publication is final even if the object store fails now.
        return version_of(model_id, done, json.loads(encoded))

    def _store(self, blobs: Mapping[str, bytes], manifest: bytes) -> None:
        for name in sorted(blobs):
            self._objects.put_content("blobs", blobs[name])
        self._objects.put_content("manifests", manifest)

    def _restore_swept(self, blobs: Mapping[str, bytes], manifest: bytes) -> float:
        """Wait for a running sweep to end and store again what it removed.

        Returns the time (of `elapsed_s`) until which no other sweep can remove contents that no record names. Raises Unavailable
        (REGISTRY_BUSY) if the sweep takes longer than SWEEP_WAIT_S.
        """
        give_up_at = elapsed_s() + SWEEP_WAIT_S
        watch = LeaseWatch(self._objects)
        contents: list[tuple[Kind, str]] = [("manifests", digest_of(manifest))]
        contents += [("blobs", digest_of(data)) for data in blobs.values()]
        while True:
            asked_at = elapsed_s()
            if watch.is_held():
                if asked_at >= give_up_at:
                    raise Unavailable(
                        f"a sweep has been running for {SWEEP_WAIT_S:g} s", reason="REGISTRY_BUSY"
                    )
                time.sleep(SWEEP_POLL_S)
                continue
            if all(self._objects.has_content(kind, digest) for kind, digest in contents):
                return asked_at + COMMIT_S
            self._store(blobs, manifest)

    def _find_request(self, request_id: str, model_id: str, digest: str) -> VersionRecord | None:
        number = self._index.version_of_request(model_id, request_id)
        if number is None:
            return None
        (record,) = self._index.records(model_id, [number])
        if record.manifest_digest != digest:
            raise other_contents_error(request_id, model_id, number)
        return record

    def _claim(self, request_id: str, model_id: str) -> None:
        # A Redis cluster cannot search all models for a request, so the object store records the model of each request.
        owner = self._objects.claim(request_id, model_id)
        if owner != model_id:
            self._index.state(owner)
            raise other_contents_error(
                request_id, owner, self._index.version_of_request(owner, request_id)
            )

    def _find_record(self, model_id: str, version: int) -> VersionRecord:
        check_model_id(model_id)
        return self._record(model_id, version, self._index.state(model_id))

    def _version_of_request(self, model_id: str, request_id: str) -> int | None:
        self._index.state(model_id)
        return self._index.version_of_request(model_id, request_id)

    def _record(self, model_id: str, version: int, state: ModelState) -> VersionRecord:
        if 1 <= version <= state.num_versions:
            (record,) = self._index.records(model_id, [version])
            return record
        raise no_version_error(model_id, version)

    def _read_manifest(self, digest: str, *, is_fresh: bool) -> bytes:
        return self._objects.read_manifest(digest, is_fresh=is_fresh)

    def resolve(self, model_id: str, alias: str) -> PublishedVersion:
        """Raises NotFound, Corrupt."""
        check_model_id(model_id)
        check_alias(alias)
        state = self._index.state(model_id)
        version = self._change(model_id, alias, state).to_version
        return self._version(model_id, self._record(model_id, version, state))

    def target(self, model_id: str, alias: str) -> AliasTarget:
        """Raises NotFound."""
        check_model_id(model_id)
        check_alias(alias)
        state = self._index.state(model_id)
        last = self._change(model_id, alias, state)
        record = self._record(model_id, last.to_version, state)
        return AliasTarget(self._listed(model_id, record), last.canary)

    def _change(self, model_id: str, alias: str, state: ModelState) -> AliasChange:
        if alias not in state.aliases:
            raise no_alias_error(model_id, alias, state.aliases)
        return state.aliases[alias]

    def list_versions(
        self, model_id: str, *, before: int | None = None, limit: int = 100
    ) -> list[PublishedVersion]:
        """See `Registry.list_versions`. `limit` is in [1, 1000]. Raises InvalidInput."""
        check_model_id(model_id)
        check_limit(limit)
        newest = self._index.state(model_id).num_versions
        if before is not None:
            newest = min(newest, before - 1)
        numbers = list(range(newest, max(newest - limit, 0), -1))
        records = self._index.records(model_id, numbers)
        return [self._listed(model_id, record) for record in records]

    def read_blob(self, version: PublishedVersion, name: str) -> bytes:
        """Raises NotFound, Corrupt with metadata expected_digest and actual_digest."""
        digest = blob_digest(version.manifest, name, version.model_id, version.version)
        return self._objects.read("blobs", digest, blob_size_bytes(version.manifest, name))

    def aliases(self, model_id: str) -> dict[str, int]:
        """In alphabetical order."""
        check_model_id(model_id)
        known = self._index.state(model_id).aliases
        return {alias: known[alias].to_version for alias in sorted(known)}

    def canaries(self, model_id: str) -> dict[str, Canary]:
        """In alphabetical order."""
        check_model_id(model_id)
        known = self._index.state(model_id).aliases
        found = {alias: known[alias].canary for alias in sorted(known)}
        return {alias: canary for alias, canary in found.items() if canary is not None}

    def _change_alias(self, move: AliasMove, propose: Propose) -> AliasChange:
        def entry(state: ModelState) -> Entry | AliasChange:
            last = state.aliases.get(move.alias)
            change = propose(last)
            return change if change == last else Entry(move.model_id, state.applied + 1, (change,))

        committed = self._index.commit(move.model_id, entry)
        return committed.changes[0] if isinstance(committed, Entry) else committed

    def alias_history(self, model_id: str, alias: str) -> list[AliasChange]:
        """Newest first. Raises NotFound."""
        check_model_id(model_id)
        check_alias(alias)
        self._change(model_id, alias, self._index.state(model_id))
        changes = [
            change
            for _, change in self._events(model_id, 0)
            if isinstance(change, AliasChange) and change.alias == alias
        ]
        return changes[::-1]

    def events(
        self, model_id: str, *, after_event: int = 0, timeout_s: float = 0.0
    ) -> Iterator[RegistryEvent]:
        """Iterate over events in order up to the newest. Numbers count within the model and stay the same after a rebuild."""
        check_model_id(model_id)
        after_event = min(max(after_event, 0), _LARGEST_EVENT - 1)
        give_up_at = time.monotonic() + timeout_s
        while True:
            is_any = False
            for number, what in self._events(model_id, after_event):
                after_event = number
                if what is None:
                    continue
                is_any = True
                if isinstance(what, int):
                    published = self._listed(model_id, self._find_record(model_id, what))
                    yield RegistryEvent(number, published)
                else:
                    yield RegistryEvent(number, what)
            remaining_s = give_up_at - time.monotonic()
            if is_any or remaining_s <= 0:
                return
            self._index.wait(model_id, after_event, remaining_s)

    def last_event(self, model_id: str) -> int:
        """See `Registry.last_event`."""
        check_model_id(model_id)
        return self._index.state(model_id).num_events

    def _events(self, model_id: str, after: int) -> Iterator[tuple[int, int | AliasChange | None]]:
        self._index.state(model_id)
        while page := self._index.events(model_id, after):
            yield from page
            after = page[-1][0]

    def check_writable(self) -> None:
        """See `Registry.check_writable`."""
        self._objects.check_writable()
        self._redis.check_writable()

    def models(self) -> list[str]:
        """List all models with a published router."""
        return self._index.models()

    def rebuild(self, model_id: str) -> ModelState:
        """Rebuild a model's index from its journal. Atomic: readers see the old or the new index. Raises Corrupt, NotFound."""
        check_model_id(model_id)
        return self._index.rebuild(model_id)

    def sweep(self, *, grace_s: float = GRACE_S, is_rehearsal: bool = False) -> Sweep:
        """See `shared.registry.sweep.sweep`. Takes at least a minute and a half, during which publications wait.

        Raises also PreconditionFailed (NO_EXPIRING_REQUESTS).
        """
        if not is_rehearsal:
            self._objects.check_removals()
        return sweep(self._objects, grace_s=grace_s, is_rehearsal=is_rehearsal)

    def close(self) -> None:
        """Idempotent."""
        self._redis.close()
