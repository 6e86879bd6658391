import fcntl

import pytest

from shared import file_lock as module
from shared.errors import Unavailable
from shared.file_lock import file_lock
from shared.registry.local import LocalRegistry


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


@pytest.mark.parametrize("name", ["publish.lock", "index.db.lock", "open.lock", "journal.lock"])
def test_a_registry_does_not_wait_for_a_process_that_hangs(tmp_path, monkeypatch, name):
    """Whichever lock it holds: publishing ends, or opening does, and afterwards all is as it was."""
    monkeypatch.setattr(module, "FILE_LOCK_S", 0.05)
    registry = LocalRegistry(tmp_path)
    if name == "open.lock":
        registry.close()
    with (tmp_path / name).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if name == "publish.lock":
            with pytest.raises(Unavailable) as raised:
                registry.publish("tiny", {}, {"x": b"1"}, request_id="one")
            assert raised.value.reason == "LOCKED"
        elif name == "journal.lock":
            assert registry.publish("tiny", {}, {"x": b"1"}, request_id="one").version == 1
        else:
            with pytest.raises(Unavailable) as raised:
                LocalRegistry(tmp_path)
            assert raised.value.reason == "LOCKED"
    registry.close()
    with_room = LocalRegistry(tmp_path)
    assert with_room.publish("tiny", {}, {"x": b"1"}, request_id="one").version == 1
    assert len(list(tmp_path.rglob("*.json"))) == 2
    with_room.close()
