"""Derives a model's state, and the updates of its index, from journal records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.errors import Corrupt
from shared.registry.base import AliasChange
from shared.registry.journal import JournalEntry, VersionRecord

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
