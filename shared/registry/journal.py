"""A model's journal: an append-only sequence of immutable records, one object each. The index is derived from it.

Records are numbered from 1 without gaps. The store lets only one writer create a number, so the journal orders all
publications and changes of a model. A change is final once its record exists, whatever happens to its writer or the
index.
"""

import re
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

import structlog

from shared.errors import Corrupt
from shared.registry.base import AliasChange, Canary
from shared.registry.encoding import open_sealed, seal
from shared.registry.store import SCHEMA_VERSION, Store, check_schema

_NAME = re.compile(r"[0-9]{20}\.json")

log = structlog.get_logger("neap.registry")


@dataclass(frozen=True)
class VersionRecord:
    """A version in the journal and the index. Its manifest is a separate object. `create_time_s` is in Unix seconds."""

    version: int
    manifest_digest: str
    create_time_s: float
    size_bytes: int
    request_id: str
    actor: str


@dataclass(frozen=True)
class JournalEntry:
    """Record `sequence` of a model: a publication with the aliases it moved, or an alias change."""

    model_id: str
    sequence: int
    changes: tuple[AliasChange, ...]
    published: VersionRecord | None = None
    entry_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Journal:
    def __init__(self, store: Store) -> None:
        self._store = store

    def append(self, entry: JournalEntry) -> bool:
        """Write a record. Returns False if another writer has taken its number.

        Raises Unavailable, after which the record may exist nevertheless.
        """
        path = _path(entry.model_id, entry.sequence)
        if self._store.create(path, _encode(entry)):
            return True
        # An earlier attempt may have succeeded although its answer was lost.
        return self.read(entry.model_id, entry.sequence).entry_id == entry.entry_id

    def has(self, model_id: str, sequence: int) -> bool:
        return self._store.exists(_path(model_id, sequence))

    def sync(self, model_id: str) -> None:
        """Make the records that exist survive a power cut, because their writers may not have come so far."""
        self._store.sync(_path(model_id, 1))

    def after(self, model_id: str, sequence: int) -> list[JournalEntry]:
        """Return all records after `sequence`. Raises Corrupt, also if a record in between is missing."""
        names = self._store.names(_folder(model_id), after=_name(sequence))
        numbers = [int(name.partition(".")[0]) for name in names if _NAME.fullmatch(name)]
        expected = range(sequence + 1, sequence + 1 + len(numbers))
        if missing := sorted(set(expected) - set(numbers)):
            raise Corrupt(
                f"the journal of {model_id!r} lacks {_name(missing[0])}, although later records exist",
                reason="JOURNAL_INCOMPLETE",
                metadata={"model_id": model_id},
            )
        if min(self._store.max_parallel_reads, len(numbers)) < 2:
            return [self.read(model_id, number) for number in numbers]
        with ThreadPoolExecutor(self._store.max_parallel_reads) as pool:
            return list(pool.map(lambda number: self.read(model_id, number), numbers))

    def models(self) -> list[str]:
        """List all models that have a journal."""
        return [name.replace("!", "/") for name in self._store.folders("models")]

    def read(self, model_id: str, sequence: int) -> JournalEntry:
        """Return a record. Raises Corrupt, also if it is missing."""
        path = _path(model_id, sequence)
        record = open_sealed(self._store.get(path) or b"", path)
        entry = _decode(record)
        if (entry.model_id, entry.sequence) != (model_id, sequence):
            raise Corrupt(f"the stored record {path} belongs to another path")
        return entry


def _folder(model_id: str) -> str:
    # '/' becomes '!', which no model id contains, so the folders of two models cannot overlap.
    return f"models/{model_id.replace('/', '!')}/journal"


def _name(sequence: int) -> str:
    return f"{sequence:020d}.json"


def _path(model_id: str, sequence: int) -> str:
    return f"{_folder(model_id)}/{_name(sequence)}"


def _encode(entry: JournalEntry) -> bytes:
    changes = [change_to_record(change) for change in entry.changes]
    return seal({**asdict(entry), "changes": changes, "schema_version": SCHEMA_VERSION})


def _decode(record: dict[str, Any]) -> JournalEntry:
    check_schema(record["schema_version"])
    model_id, published = record["model_id"], record["published"]
    return JournalEntry(
        model_id=model_id,
        sequence=record["sequence"],
        changes=changes_from_records(model_id, record["changes"]),
        published=None if published is None else version_from_record(published),
        entry_id=record["entry_id"],
    )


def change_to_record(change: AliasChange) -> dict[str, Any]:
    """Encode a change without its model, which the record's path names."""
    record = asdict(change)
    del record["model_id"]
    return record


def changes_from_records(model_id: str, records: Sequence[dict[str, Any]]) -> tuple[AliasChange, ...]:
    return tuple(change_from_record(model_id, record) for record in records)


def change_from_record(model_id: str, record: Mapping[str, Any]) -> AliasChange:
    canary = record["canary"]
    canary = None if canary is None else Canary(**_known(Canary, canary))
    return AliasChange(**_known(AliasChange, {**record, "model_id": model_id, "canary": canary}))


def version_from_record(record: Mapping[str, Any]) -> VersionRecord:
    return VersionRecord(**_known(VersionRecord, record))


def _known(kind: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the fields that a newer build has added.
    Changes that readers must understand have another schema version."""
    names = {field.name for field in fields(kind)}
    if unknown := record.keys() - names:
        _log_unknown(kind.__name__, *sorted(unknown))
    return {name: record[name] for name in names & record.keys()}


@lru_cache(maxsize=64)
def _log_unknown(kind: str, *names: str) -> None:
    """Log once per process and set of names."""
    log.warning("fields of a newer neap are left out", of=kind, fields=list(names))
