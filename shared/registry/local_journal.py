"""The journal of a registry in a folder: what its index.db has committed, record by record, so that it can be made anew.

SQLite orders here, so an event has happened once it is committed; its record follows. A process that dies between the two leaves
the journal one behind, and whoever opens the folder or changes the model next writes what is missing. Folders from before there was
a journal get theirs in the same way.
"""

from pathlib import Path

import structlog

from shared.errors import Corrupt, Exhausted, NeapError, PreconditionFailed, Unavailable
from shared.registry.folder_records import FolderRecords
from shared.registry.index import RegistryIndex
from shared.registry.journal import Entry, Journal

log = structlog.get_logger("neap.registry")


class LocalJournal:
    """Record n of a model is its n-th event. Methods raise Unavailable, Exhausted (DISK_FULL), Corrupt."""

    def __init__(self, root: Path, index: RegistryIndex) -> None:
        self._root = root
        self._index = index
        self.journal = Journal(FolderRecords(root))

    def check_index(self, model_id: str) -> None:
        """Inside a transaction and before it adds an event. Raises PreconditionFailed (INDEX_BEHIND): the journal has it already."""
        if self.journal.has(model_id, self._index.num_events(model_id) + 1):
            raise index_behind(self._root, model_id)

    def follow(self, model_id: str) -> None:
        """Write what the journal lacks at its end. What cannot be written now is logged and written by the next that calls this:
        it has happened, and the index says so."""
        try:
            num_events = self._index.num_events(model_id)
            recorded = num_events
            while recorded and not self.journal.has(model_id, recorded):
                recorded -= 1
            self._append(self._index.entries(model_id, after=recorded))
        except (Unavailable, Exhausted, Corrupt) as error:
            _not_written(model_id, error)

    def open(self) -> None:
        """Compare the whole journal with the index and write what is missing, wherever. Raises PreconditionFailed (INDEX_BEHIND)."""
        for model_id in sorted({*self._index.models(), *self.journal.models()}):
            self._check(model_id)
            try:
                self.complete(model_id)
            except (Unavailable, Exhausted, Corrupt) as error:
                _not_written(model_id, error)

    def _check(self, model_id: str) -> None:
        if self.journal.has(model_id, self._index.num_events(model_id) + 1):
            raise index_behind(self._root, model_id)

    def complete(self, model_id: str) -> None:
        """Every record that is not there."""
        there = set(self.journal.sequences(model_id))
        if len(there) < self._index.num_events(model_id):
            entries = self._index.entries(model_id, after=0)
            self._append([entry for entry in entries if entry.sequence not in there])

    def mend(self, model_id: str) -> None:
        """Every record that is damaged or not there, from the index."""
        for entry in self._index.entries(model_id, after=0):
            try:
                self.journal.read(model_id, entry.sequence)
            except Corrupt as error:
                log.warning("a journal record is written again", problem=error.message)
                self.journal.restore(entry)

    def _append(self, entries: list[Entry]) -> None:
        for entry in entries:
            if not self.journal.append(entry):
                raise index_behind(self._root, entry.model_id)


def index_behind(root: Path, model_id: str) -> PreconditionFailed:
    return PreconditionFailed(
        f"index.db of {root} is older than the journal beside it, which records more of {model_id!r} (was it restored from a"
        f" backup?): `neap routers rebuild-index --registry {root}` brings it up to date",
        reason="INDEX_BEHIND",
        metadata={"model_id": model_id},
    )


def _not_written(model_id: str, error: NeapError) -> None:
    log.error(
        "the journal lacks records that the index has; they are written with the next change",
        model_id=model_id,
        problem=error.message,
    )
