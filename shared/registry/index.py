"""An index answers what a model's journal says and can be made anew from it: its state, how records advance it, the
interface of indexes, and the one in the memory of a process. redis_index.py has the one in Redis."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.errors import Corrupt
from shared.registry.base import AliasChange
from shared.registry.journal import JournalEntry, VersionRecord

# Replace an index whatever record it is at.
ANYWHERE = -1
EVENT_PAGE = 100
# An event's number, and the version published, the change, or None for an event of a kind that a newer build has added.
Event = tuple[int, int | AliasChange | None]


@dataclass(frozen=True)
class ModelState:
    """A model's state after the first `applied` records.

    Events are numbered from 1. `aliases` has the last change of each alias.
    """

    applied: int = 0
    num_versions: int = 0
    num_events: int = 0
    aliases: Mapping[str, AliasChange] = field(default_factory=dict)


@dataclass(frozen=True)
class Advance:
    """The update of an index from the state after `before` records to `state`: `versions` and `events` to add."""

    before: int
    state: ModelState
    versions: Sequence[VersionRecord]
    events: Sequence[Event]


def advance(state: ModelState, entries: Sequence[JournalEntry]) -> Advance:
    """Apply records in order. Deterministic, so every client computes the same index. Raises Corrupt."""
    before, aliases = state.applied, dict(state.aliases)
    num_versions, num_events = state.num_versions, state.num_events
    versions: list[VersionRecord] = []
    events: list[Event] = []
    for sequence, entry in enumerate(entries, start=before + 1):
        fits = entry.sequence == sequence
        if (published := entry.published) is not None:
            num_versions += 1
            fits = fits and published.version == num_versions
            versions.append(published)
            events.append((num_events := num_events + 1, published.version))
        for change in entry.changes:
            last = aliases.get(change.alias)
            fits = fits and change.from_version == (None if last is None else last.to_version)
            named = [change.to_version, *([change.canary.version] if change.canary else [])]
            fits = fits and all(1 <= version <= num_versions for version in named)
            aliases[change.alias] = change
            events.append((num_events := num_events + 1, change))
        if not fits:
            raise Corrupt(
                f"record {entry.sequence} of the journal of {entry.model_id!r} contradicts earlier records",
                reason="JOURNAL_INCONSISTENT",
                metadata={"model_id": entry.model_id, "sequence": str(entry.sequence)},
            )
    after = ModelState(before + len(entries), num_versions, num_events, aliases)
    return Advance(before, after, versions, events)


class IndexDamaged(Exception):
    """The index of a model cannot be read. The text is for the log."""


class Index(Protocol):
    """Thread-safe. Methods that read raise IndexDamaged. All raise the errors of the index's server."""

    # How long after a look into the journal answers are given without another look.
    freshness_s: float
    # Whether it may have lost what it knew, so that an empty answer has to be compared with the journal.
    may_forget: bool

    def open(self, registry_id: str) -> None:
        """Check that the index can be used, for this registry only. Call it before any query."""

    def check_writable(self) -> None: ...

    def state(self, model_id: str) -> ModelState:
        """Return the model's state, empty if it is not in the index."""

    def versions(self, model_id: str, numbers: Sequence[int]) -> list[VersionRecord]:
        """Return the records of existing versions, in the order of `numbers`."""

    def version_of_request(self, model_id: str, request_id: str) -> int | None: ...

    def events(self, model_id: str, after: int) -> list[Event]:
        """Return the next page of events."""

    def wait(self, model_id: str, after: int, timeout_s: float) -> None:
        """Wait until there is an event after `after`, for at most `timeout_s`.
        May return early, to have the journal looked at."""

    def advance(self, model_id: str, step: Advance, *, replace_at: int | None = None) -> int:
        """Apply all of `step` atomically if the index is at the record where `step` begins.
        Returns the record where it is now.

        With `replace_at`, replace an index that is at that record by `step`, which begins at an empty index.
        """

    def close(self) -> None: ...


@dataclass
class _Model:
    state: ModelState = field(default_factory=ModelState)
    versions: list[VersionRecord] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class MemoryIndex:
    """An `Index` in the memory of one process.

    Other processes tell it nothing, so the journal is looked at every `freshness_s`, and every `poll_s` while an event
    is awaited.
    """

    may_forget = False

    def __init__(self, *, freshness_s: float, poll_s: float) -> None:
        self.freshness_s = freshness_s
        self._poll_s = poll_s
        self._models: dict[str, _Model] = {}
        self._changed = threading.Condition()

    def open(self, registry_id: str) -> None:
        """Nothing to check: it belongs to this process."""

    def check_writable(self) -> None:
        """Nothing to check."""

    def _model(self, model_id: str) -> _Model:
        return self._models.get(model_id) or _Model()

    def state(self, model_id: str) -> ModelState:
        return self._model(model_id).state

    def versions(self, model_id: str, numbers: Sequence[int]) -> list[VersionRecord]:
        known = self._model(model_id).versions
        return [known[number - 1] for number in numbers]

    def version_of_request(self, model_id: str, request_id: str) -> int | None:
        return self._model(model_id).requests.get(request_id)

    def events(self, model_id: str, after: int) -> list[Event]:
        with self._changed:
            known = self._model(model_id).events
            return known[after : after + EVENT_PAGE]

    def wait(self, model_id: str, after: int, timeout_s: float) -> None:
        with self._changed:
            if self.state(model_id).num_events <= after:
                self._changed.wait(min(timeout_s, self._poll_s))

    def advance(self, model_id: str, step: Advance, *, replace_at: int | None = None) -> int:
        with self._changed:
            old = self._model(model_id)
            begins_at = step.before if replace_at is None else replace_at
            if begins_at not in (ANYWHERE, old.state.applied):
                return old.state.applied
            new = _Model() if replace_at is not None else old
            # The state last: what it names is there when it is read.
            new.versions.extend(step.versions)
            new.requests.update({version.request_id: version.version for version in step.versions})
            new.events.extend(step.events)
            new.state = step.state
            self._models[model_id] = new
            self._changed.notify_all()
            return step.state.applied

    def close(self) -> None:
        """Nothing to close."""
