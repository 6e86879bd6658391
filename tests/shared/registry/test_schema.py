"""Registries of another form are refused, with what to do."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from shared.errors import PreconditionFailed
from shared.registry.encoding import open_sealed, seal
from shared.registry.factory import open_registry
from shared.registry.registry import Registry
from shared.registry.store import SCHEMA_VERSION
from tests.reasons import raises

MARKER, RECORD = "neap-registry.json", "models/tiny/journal/00000000000000000001.json"
REASONS = {1: "SCHEMA_TOO_OLD", SCHEMA_VERSION - 1: "SCHEMA_TOO_OLD", SCHEMA_VERSION + 1: "SCHEMA_TOO_NEW"}


@pytest.mark.parametrize("found", REASONS)
@pytest.mark.parametrize("path", [MARKER, RECORD])
def test_a_registry_or_a_record_of_another_schema_is_refused(
    place: str, open_again: Callable[[], Registry], path: str, found: int
) -> None:
    registry = open_again()
    registry.publish("tiny", {"a": 1}, {"x": b"weights"}, request_id="one")
    store = registry._store
    record = open_sealed(store.get(path) or b"", path)
    assert record["schema_version"] == SCHEMA_VERSION
    store.replace(path, seal({**record, "schema_version": found}))
    with raises(PreconditionFailed, REASONS[found]) as caught:
        registry.sweep() if path == RECORD else open_again()
    assert caught.value.metadata == {"found": str(found), "supported": str(SCHEMA_VERSION)}
    assert ("calibrate again" if found < SCHEMA_VERSION else "upgrade neap") in caught.value.message
    store.replace(path, seal(record))
    assert open_again().resolve("tiny", "latest").version == 1


def test_a_folder_whose_order_was_that_of_sqlite_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "index.db")) as index:
        index.execute("CREATE TABLE versions (version)")
    with raises(PreconditionFailed, "SCHEMA_TOO_OLD") as caught:
        open_registry(str(tmp_path))
    assert "calibrate again" in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["index.db"]
