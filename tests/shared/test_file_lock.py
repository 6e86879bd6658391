import fcntl

import pytest

from shared import file_lock as module
from shared.errors import Unavailable
from shared.file_lock import file_lock
from shared.registry.factory import open_registry


def test_a_lock_is_not_waited_for_without_bound(tmp_path):
    path = tmp_path / "a.lock"
    with file_lock(path, shared=True), file_lock(path, shared=True):
        with pytest.raises(Unavailable) as raised, file_lock(path, timeout_s=0.05):
            pass
        assert raised.value.reason == "LOCKED"
    with file_lock(path), pytest.raises(Unavailable), file_lock(path, timeout_s=0):
        pass
    with file_lock(path, timeout_s=0):
        pass


def test_a_registry_does_not_wait_for_a_process_that_hangs(tmp_path, monkeypatch):
    """As a sweep may that holds the lock. Everything but publishing goes on."""
    monkeypatch.setattr(module, "FILE_LOCK_S", 0.05)
    registry = open_registry(str(tmp_path))
    registry.publish("tiny", {}, {"x": b"1"}, request_id="one")
    with (tmp_path / "publish.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable) as raised:
            registry.publish("tiny", {}, {"x": b"2"}, request_id="two")
        assert raised.value.reason == "LOCKED"
        other = open_registry(str(tmp_path))
        other.set_alias("tiny", "stable", 1)
        assert registry.aliases("tiny") == {"latest": 1, "stable": 1}
    assert registry.publish("tiny", {}, {"x": b"2"}, request_id="two").version == 2
