"""Derives a model's state, and the updates of its index, from journal records."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from shared.errors import Corrupt
from shared.registry.base import AliasChange
from shared.registry.journal import Entry, change_to_record


@dataclass(frozen=True)
class ModelState:
    """A model's state after the first `applied` records.

    `aliases` has the last change of each alias. Events are numbered from 1 to `num_events`.
    """

    applied: int = 0
    num_versions: int = 0
    num_events: int = 0
    aliases: Mapping[str, AliasChange] = field(default_factory=dict)


@dataclass(frozen=True)
class Advance:
    """The update from the state after `before` records to `state`: index `fields` to set and `events` to append, all as JSON."""

    before: int
    state: ModelState
    fields: Mapping[str, str]
    events: Sequence[str]


def advance(state: ModelState, entries: Sequence[Entry]) -> Advance:
    """Apply records in order. Deterministic, so every client computes the same index. Raises Corrupt."""
    before = state.applied
    num_versions, aliases = state.num_versions, dict(state.aliases)
    fields: dict[str, str] = {}
    events: list[str] = []
    for offset, entry in enumerate(entries, start=1):
        fits = entry.sequence == before + offset
        if (made := entry.published) is not None:
            fits = fits and made.version == num_versions + 1
            num_versions += 1
            fields[version_field(made.version)] = json.dumps(asdict(made))
            fields[request_field(made.request_id)] = str(made.version)
            events.append(json.dumps({"version": made.version}))
        for change in entry.changes:
            last = aliases.get(change.alias)
            fits = fits and change.from_version == (None if last is None else last.to_version)
            named = [change.to_version, *([change.canary.version] if change.canary else [])]
            fits = fits and all(1 <= version <= num_versions for version in named)
            aliases[change.alias] = change
            events.append(json.dumps({"change": change_to_record(change)}))
        if not fits:
            raise Corrupt(
                f"record {entry.sequence} of the journal of {entry.model_id!r} contradicts earlier records",
                reason="JOURNAL_INCONSISTENT",
                metadata={"model_id": entry.model_id, "sequence": str(entry.sequence)},
            )
    after = ModelState(before + len(entries), num_versions, state.num_events + len(events), aliases)
    return Advance(before, after, fields, events)


def version_field(version: int) -> str:
    return f"version:{version}"


def request_field(request_id: str) -> str:
    return f"request:{request_id}"
