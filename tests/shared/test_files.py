"""Atomic and durable writes of files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import Unavailable
from shared.files import file_lock, write_atomically, write_synced

STEPS = ["write", "written", "synced", "renamed"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    return path


def test_the_new_contents_replace_the_old(path):
    assert path.read_bytes() == b"old"
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_contents_are_flushed_before_the_name_and_the_name_before_the_return(path, monkeypatch):
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"  # noqa: PTH112
        order.append(f"sync {kind}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", lambda own, to: order.append("rename") or rename(own, to))
    write_atomically(path, b"new")
    assert order == ["sync file", "rename", "sync folder"]
    write_synced(path, b"whole folder")
    assert order[3:] == ["sync file"]


@pytest.mark.parametrize("failing", STEPS[:3])
def test_after_an_error_the_old_contents_stay_and_nothing_else(path, failing):
    def step(name: str) -> None:
        if name == failing:
            raise OSError(28, "no space left")

    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, b"new", step=step)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("failing", STEPS)
def test_a_writer_that_is_killed_leaves_the_old_contents_or_the_new(path, failing):
    code = (
        "import os, sys; from pathlib import Path; from shared.files import write_atomically\n"
        "kill = lambda name: os.kill(os.getpid(), 9) if name == sys.argv[2] else None\n"
        "write_atomically(Path(sys.argv[1]), b'new' * 100_000, step=kill)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(path), failing], check=False)
    assert killed.returncode == -9
    expected = b"new" * 100_000 if failing == "renamed" else b"old"
    assert path.read_bytes() == expected
    write_atomically(path, b"newer")  # leftovers of a killed writer do not block the next
    assert path.read_bytes() == b"newer"


def test_a_missing_folder_is_not_created(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "file", b"new")


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
