"""The truth about a model: an append-only sequence of immutable records, one object each. The index is what they add up to.

Records are numbered from 1 without gaps. In a bucket the object store lets only one writer create a number, so the journal orders
everything that ever happened to a model, versions included; what is in it has happened, whatever becomes of its writer or of the
index. In a folder SQLite orders, and the journal keeps what it has committed (`shared.registry.local_journal`).
"""

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from shared.errors import Corrupt, PreconditionFailed
from shared.registry.base import AliasChange, Canary
from shared.registry.sealed import open_sealed, seal

# Records with a canary are of schema 2; all others are written as they always were.
_ENTRY_SCHEMA = 2
_MAX_PARALLEL_READS = 16


@dataclass(frozen=True)
class VersionRecord:
    """A version as journal and index hold it; the manifest is an object of its own. `create_time_s`: Unix seconds."""

    version: int
    manifest_digest: str
    create_time_s: float
    size_bytes: int
    request_id: str
    actor: str


@dataclass(frozen=True)
class Entry:
    """Record `sequence` of a model: a publication with the aliases it moved, or the move of an alias. `event`: its number where a
    backend counts events over all models; such a backend has a record for each."""

    model_id: str
    sequence: int
    changes: tuple[AliasChange, ...]
    published: VersionRecord | None = None
    entry_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    event: int | None = None


class RecordStore(Protocol):
    """Where records lie, by paths with '/'. A bucket (`ObjectStore`) or a folder (`FolderRecords`)."""

    def create(self, path: str, data: bytes) -> bool:
        """Whether it was not there before."""

    def replace(self, path: str, data: bytes) -> None: ...

    def get(self, path: str) -> bytes | None: ...

    def exists(self, path: str) -> bool: ...

    def names(self, folder: str, *, after: str = "") -> list[str]:
        """In order, from the name that follows `after`."""

    def folders(self, folder: str) -> list[str]: ...


class Journal:
    def __init__(self, objects: RecordStore) -> None:
        self._objects = objects

    def append(self, entry: Entry) -> bool:
        """False when another writer has this number. Raises Unavailable, after which it may still be there."""
        path = _path(entry.model_id, entry.sequence)
        if self._objects.create(path, _encode(entry)):
            return True
        # A first attempt may have succeeded and lost only its answer.
        return self.read(entry.model_id, entry.sequence).entry_id == entry.entry_id

    def restore(self, entry: Entry) -> None:
        """In place of a record that is damaged or gone, by whoever knows for certain what it said."""
        self._objects.replace(_path(entry.model_id, entry.sequence), _encode(entry))

    def sequences(self, model_id: str) -> list[int]:
        """Numbers of the records that are there, in order."""
        return [int(name.partition(".")[0]) for name in self._objects.names(_folder(model_id))]

    def has(self, model_id: str, sequence: int) -> bool:
        return self._objects.exists(_path(model_id, sequence))

    def after(self, model_id: str, sequence: int) -> list[Entry]:
        """All that follow record `sequence`. Raises Corrupt, also when one is missing in between."""
        names = self._objects.names(_folder(model_id), after=_name(sequence))
        wanted = [_name(number) for number in range(sequence + 1, sequence + 1 + len(names))]
        if names != wanted:
            missing = sorted(set(wanted) - set(names))
            raise Corrupt(
                f"the journal of {model_id!r} lacks {missing[0]}, although later records are there",
                reason="JOURNAL_INCOMPLETE",
                metadata={"model_id": model_id},
            )
        numbers = range(sequence + 1, sequence + 1 + len(names))
        if len(numbers) < 2:
            return [self.read(model_id, number) for number in numbers]
        with ThreadPoolExecutor(_MAX_PARALLEL_READS) as pool:
            return list(pool.map(lambda number: self.read(model_id, number), numbers))

    def models(self) -> list[str]:
        """Every model that has a journal."""
        return [name.replace("!", "/") for name in self._objects.folders("models")]

    def read(self, model_id: str, sequence: int) -> Entry:
        """Raises Corrupt, also when it is not there."""
        path = _path(model_id, sequence)
        record = open_sealed(self._objects.get(path) or b"", path)
        entry = _decode(record)
        if (entry.model_id, entry.sequence) != (model_id, sequence):
            raise Corrupt(f"the stored record {path} is that of another place")
        return entry


def _folder(model_id: str) -> str:
    # No model id holds '!', so a model may be named like a folder of another.
    return f"models/{model_id.replace('/', '!')}/journal"


def _name(sequence: int) -> str:
    return f"{sequence:020d}.json"


def _path(model_id: str, sequence: int) -> str:
    return f"{_folder(model_id)}/{_name(sequence)}"


def _encode(entry: Entry) -> bytes:
    changes = [change_to_record(change) for change in entry.changes]
    record = asdict(replace(entry, changes=()))
    if entry.event is None:
        del record["event"]
    schema = _ENTRY_SCHEMA if any("canary" in change for change in changes) else 1
    return seal({**record, "changes": changes, "schema_version": schema})


def _decode(record: dict[str, Any]) -> Entry:
    if record.get("schema_version", 0) > _ENTRY_SCHEMA:
        raise PreconditionFailed(
            "the registry holds records of a newer neap: upgrade neap", reason="SCHEMA_TOO_NEW"
        )
    model_id, published = record["model_id"], record["published"]
    return Entry(
        model_id=model_id,
        sequence=record["sequence"],
        changes=changes_from_records(model_id, record["changes"]),
        published=None if published is None else VersionRecord(**published),
        entry_id=record["entry_id"],
        event=record.get("event"),
    )


def change_to_record(change: AliasChange) -> dict[str, Any]:
    """All but the model, which the place of the record says, and a canary only where there is one."""
    record = asdict(change)
    del record["model_id"]
    if change.canary is None:
        del record["canary"]
    return record


def changes_from_records(
    model_id: str, records: Sequence[dict[str, Any]]
) -> tuple[AliasChange, ...]:
    return tuple(change_from_record(model_id, record) for record in records)


def change_from_record(model_id: str, record: dict[str, Any]) -> AliasChange:
    canary = record.get("canary")
    fields = {**record, "canary": None if canary is None else Canary(**canary)}
    return AliasChange(model_id=model_id, **fields)
