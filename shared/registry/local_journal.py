"""The journal of a registry in a folder. It records what index.db has committed, so that index.db can be rebuilt.

SQLite orders the events: an event is final once it is committed, and its record is written afterwards. If a process dies in between,
the journal lacks that record, and the next process that opens the folder or changes the model writes it. Folders from before the
journal existed get theirs in the same way.
"""

from pathlib import Path

import structlog

from shared.errors import Corrupt, Exhausted, NeapError, PreconditionFailed, Unavailable
from shared.registry.folder_records import FolderRecords
from shared.registry.index import RegistryIndex
from shared.registry.journal import Entry, Journal

log = structlog.get_logger("neap.registry")


class LocalJournal:
    """The journal of a folder. Record n of a model is its n-th event. Methods raise Unavailable, Exhausted (DISK_FULL), Corrupt."""

    def __init__(self, root: Path, index: RegistryIndex) -> None:
        self._root = root
        self._index = index
        self.journal = Journal(FolderRecords(root))

    def check_index(self, model_id: str) -> None:
        """Check that the journal has no record of the next event. Call it in a transaction before an event is added.

        Raises PreconditionFailed (INDEX_BEHIND).
        """
        if self.journal.has(model_id, self._index.num_events(model_id) + 1):
            raise index_behind_error(self._root, model_id)

    def append_missing(self, model_id: str) -> None:
        """Append the records that the journal lacks at its end.

        A failure is logged and not raised, because the events are committed in the index. The next call writes the records.
        """
        try:
            num_events = self._index.num_events(model_id)
            recorded = num_events
            while recorded and not self.journal.has(model_id, recorded):
                recorded -= 1
            self._append(self._index.entries(model_id, after=recorded))
        except (Unavailable, Exhausted, Corrupt) as error:
            _log_not_written(model_id, error)

    def open(self) -> None:
        """Compare the whole journal with the index and write all missing records. Raises PreconditionFailed (INDEX_BEHIND)."""
        for model_id in sorted({*self._index.models(), *self.journal.models()}):
            self.check_index(model_id)
            try:
                self.write_missing(model_id)
            except (Unavailable, Exhausted, Corrupt) as error:
                _log_not_written(model_id, error)

    def write_missing(self, model_id: str) -> None:
        """Write every missing record."""
        there = set(self.journal.sequences(model_id))
        if len(there) < self._index.num_events(model_id):
            entries = self._index.entries(model_id, after=0)
            self._append([entry for entry in entries if entry.sequence not in there])

    def repair(self, model_id: str) -> None:
        """Write every damaged or missing record from the index."""
        for entry in self._index.entries(model_id, after=0):
            try:
                self.journal.read(model_id, entry.sequence)
            except Corrupt as error:
                log.warning("a journal record is written again", problem=error.message)
                self.journal.restore(entry)

    def _append(self, entries: list[Entry]) -> None:
        for entry in entries:
            if not self.journal.append(entry):
                raise index_behind_error(self._root, entry.model_id)


def index_behind_error(root: Path, model_id: str) -> PreconditionFailed:
    return PreconditionFailed(
        f"index.db of {root} is older than its journal, which has more records of {model_id!r} (was index.db restored from a"
        f" backup?); `neap routers rebuild-index --registry {root}` brings it up to date",
        reason="INDEX_BEHIND",
        metadata={"model_id": model_id},
    )


def _log_not_written(model_id: str, error: NeapError) -> None:
    log.error(
        "the journal lacks records that the index has; they are written with the next change",
        model_id=model_id,
        problem=error.message,
    )
