"""Registries in a folder only: power cuts, full disks, folders that are read-only or without hard links."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from shared.errors import Corrupt, Exhausted, InvalidInput, NotFound, PreconditionFailed, Unavailable
from shared.registry import folder_store
from shared.registry.factory import open_registry
from shared.registry.registry import Registry
from tests.reasons import raises
from tests.registry_damage import content_path
from tests.small_disk import run_on_small_disk

PUBLISHER = Path(__file__).with_name("publisher.py")
REPOSITORY = Path(__file__).parents[3]
STEPS = [
    f"{step}:{kind}" for kind in ("blobs", "manifests", "requests", "models") for step in ("part", "synced", "linked")
]


def publish(registry: Registry, request_id: str = "one") -> int:
    blobs = {"x": b"weights" * 1000}
    return registry.publish("tiny", {"a": 1}, blobs, request_id=request_id).version


class Disk:
    """Notes what a disk would still have after a power cut: synced files, under the names that their folders had when
    synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._names: dict[Path, dict[str, int]] = {}
        self._synced: set[int] = set()
        fsync = os.fsync

        def note(descriptor: int) -> None:
            fsync(descriptor)
            place = Path(f"/proc/self/fd/{descriptor}").readlink()
            if place.is_dir():
                self._names[place] = {e.name: e.inode() for e in os.scandir(place)}
            else:
                self._synced.add(os.fstat(descriptor).st_ino)

        monkeypatch.setattr(os, "fsync", note)

    def after_a_power_cut(self, root: Path, target: Path) -> Path:
        """Copies what is left of the folder `root` to the folder `target`, which is beside the topmost folder that was
        made for it."""
        while root.parent != target.parent:
            assert root.name in self._names.get(root.parent, {})
            root = root.parent
        assert root.name in self._names.get(root.parent, {})
        self._copy(root, target)
        return target

    def _copy(self, folder: Path, target: Path) -> None:
        target.mkdir()
        for name, inode in self._names.get(folder, {}).items():
            path = folder / name
            if path.is_dir():
                self._copy(path, target / name)
            elif path.exists() and path.stat().st_ino == inode:
                (target / name).write_bytes(path.read_bytes() if inode in self._synced else b"")


def test_what_was_answered_survives_a_power_cut(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    root = tmp_path / "a" / "registry"
    registry = open_registry(str(root))
    publish(registry)
    left = open_registry(str(disk.after_a_power_cut(root, tmp_path / "first") / "registry"))
    assert left.read_blob(left.resolve("tiny", "latest"), "x") == b"weights" * 1000
    assert publish(left) == 1, "the request, too"
    with pytest.raises(Exception, match="already published"):
        left.publish("other", {"a": 1}, {"x": b"weights" * 1000}, request_id="one")
    registry.set_alias("tiny", "stable", 1)
    left = open_registry(str(disk.after_a_power_cut(root, tmp_path / "second") / "registry"))
    assert left.aliases("tiny") == {"latest": 1, "stable": 1}


def test_an_alias_that_another_process_is_just_moving_survives_a_power_cut(tmp_path, monkeypatch):
    """The second process answers that the alias already names the version."""
    disk = Disk(monkeypatch)
    root = tmp_path / "registry"
    second = open_registry(str(root))
    publish(second)
    answered = []

    def stand_still(name: str) -> None:
        if name == "linked:models":
            answered.append(second.set_alias("tiny", "stable", 1))
            disk.after_a_power_cut(root, tmp_path / "left")

    made = open_registry(str(root), step=stand_still).set_alias("tiny", "stable", 1)
    assert answered == [made]
    assert open_registry(str(tmp_path / "left")).aliases("tiny") == {"latest": 1, "stable": 1}


@pytest.mark.parametrize("step", ["linked:blobs", "linked:manifests", "linked:requests", "linked:models"])
def test_what_rests_on_objects_of_a_process_that_stands_still_survives_a_power_cut(tmp_path, monkeypatch, step):
    """The first publisher has linked an object and not yet synced its folder.
    The second one finds the object and answers."""
    disk = Disk(monkeypatch)
    root = tmp_path / "registry"
    second, answered = open_registry(str(root)), []

    def stand_still(name: str) -> None:
        if name == step and not answered:
            answered.append(publish(second, "one"))
            disk.after_a_power_cut(root, tmp_path / "left")

    publish(open_registry(str(root), step=stand_still), "one")
    assert answered == [1]
    left = open_registry(str(tmp_path / "left"))
    assert left.read_blob(left.resolve("tiny", "latest"), "x") == b"weights" * 1000
    assert publish(left, "one") == 1


@pytest.mark.parametrize("step", STEPS[:-1])
def test_a_full_disk_at_any_step_leaves_no_version(tmp_path: Path, step: str) -> None:
    """The step hook raises ENOSPC where the operating system would raise it."""

    def full(name: str) -> None:
        if name == step:
            raise OSError(errno.ENOSPC, "No space left on device")

    reader = open_registry(str(tmp_path))
    with raises(Exhausted, "DISK_FULL") as raised:
        publish(open_registry(str(tmp_path), step=full))
    assert raised.value.retry_after_s is None
    assert list((tmp_path / "parts").iterdir()) == []
    assert reader.list_versions("tiny") == []
    assert publish(open_registry(str(tmp_path))) == 1


def test_a_file_size_limit_while_publishing_is_reported_as_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses the write (EFBIG): RLIMIT_FSIZE in the publisher's process is below the blob's size."""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'protos'}", "FILE_SIZE_LIMIT": "300000"}
    command = [sys.executable, str(PUBLISHER), str(tmp_path), "one", "1"]
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=60, check=True)
    assert json.loads(said.stdout) == {"error": "Exhausted", "reason": "DISK_FULL"}
    assert list((tmp_path / "parts").iterdir()) == []
    assert open_registry(str(tmp_path)).list_versions("tiny") == []


def test_after_a_disk_was_full_at_any_step_publishing_works_again(tmp_path: Path) -> None:
    """The publication is absent, or complete if its record was linked before.
    The registry stays readable throughout."""
    script = Path(__file__).with_name("full_disk.py")
    lines = run_on_small_disk(tmp_path, "4m", sys.executable, script, tmp_path, *STEPS).splitlines()
    seen = [json.loads(line) for line in lines]
    assert [line[0] for line in seen] == STEPS
    for number, (step, ended, here, elsewhere, left, again) in enumerate(seen, start=1):
        before = list(range(number - 1, 0, -1))
        is_committed = ended == str(number)
        assert is_committed or ended == "DISK_FULL", step
        assert here == elsewhere == ([number, *before] if is_committed else before), step
        assert left == [], step
        assert again == str(number), step
    assert not any(ended.isdigit() for _, ended, *_ in seen[:2])


def test_a_sweep_makes_room_on_a_full_disk(tmp_path: Path) -> None:
    script = Path(__file__).with_name("full_disk.py")
    assert json.loads(run_on_small_disk(tmp_path, "4m", sys.executable, script, tmp_path)) == ["DISK_FULL", 1, "2"]


def on_a_read_only_mount(folder: Path, then: str) -> str:
    """Runs `then` on a registry with one version, mounted read-only, because root may write anywhere else.
    Returns its last line."""
    check = (
        "import sys;from shared.errors import NeapError\n"
        "from shared.registry.factory import open_registry\n"
        f"try: registry = open_registry(sys.argv[1]); {then}\n"
        "except NeapError as error: print(error.reason, error.message)"
    )
    script = '"$1" "$2" "$3" fill 1 && mount -o remount,ro "$3" && "$1" -c "$4" "$3"'
    command = ["sh", "-c", script, "sh", sys.executable, PUBLISHER, folder, check]
    return run_on_small_disk(folder, "4m", *command).splitlines()[-1]


def test_a_read_only_folder_can_be_read(tmp_path: Path) -> None:
    read = "print(registry.read_blob(registry.resolve('tiny', 'latest'), 'own'), registry.last_event('tiny'))"
    assert on_a_read_only_mount(tmp_path, read) == "b'fill-0' 2"


@pytest.mark.parametrize(
    "write",
    [
        "registry.set_alias('tiny', 'stable', 1)",
        "registry.publish('tiny', {}, {'x': b'1'}, request_id='two')",
        "registry.check_writable()",
    ],
)
def test_writing_to_a_read_only_folder_is_refused_with_a_reason(tmp_path: Path, write: str) -> None:
    said = on_a_read_only_mount(tmp_path, write)
    assert said.startswith("STORAGE_UNAVAILABLE")
    assert "(EROFS): it is read-only" in said


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_hard_links_is_refused(tmp_path, monkeypatch, code):
    def link(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(folder_store.os, "link", link)
    with raises(PreconditionFailed, "NO_CONDITIONAL_WRITES"):
        open_registry(str(tmp_path))


def test_a_folder_below_one_that_may_not_be_read_is_written(tmp_path, monkeypatch):
    sync = folder_store.sync_folder
    refused = []

    def refusing(path: Path) -> None:
        if path == tmp_path:
            refused.append(path)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        sync(path)

    monkeypatch.setattr(folder_store, "sync_folder", refusing)
    assert publish(open_registry(str(tmp_path / "registry"))) == 1
    assert refused


def test_a_sweep_removes_parts_of_killed_processes_after_a_day(tmp_path: Path) -> None:
    registry = open_registry(str(tmp_path))
    publish(registry)
    old, new, foreign = (tmp_path / "parts" / name for name in (32 * "0", 32 * "1", "notes"))
    for part in (old, new, foreign):
        part.write_bytes(b"half")
        os.utime(part, (time.time() - (23 if part == new else 25) * 3600,) * 2)
    swept = registry.sweep(grace_s=0)
    assert (swept.num_removed, swept.num_removed_bytes, swept.num_in_grace_period) == (1, 4, 1)
    assert sorted((tmp_path / "parts").iterdir()) == [new, foreign]


@pytest.mark.parametrize("damage", ["huge", "folder"])
def test_a_manifest_that_is_too_large_or_a_folder_is_reported_as_damaged(tmp_path: Path, damage: str) -> None:
    registry = open_registry(str(tmp_path))
    publish(registry)
    path = tmp_path / content_path("manifests", registry.list_versions("tiny")[0].manifest_digest)
    path.unlink()
    if damage == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.mkdir()
    (listed,) = open_registry(str(tmp_path)).list_versions("tiny")
    assert ("more than" if damage == "huge" else "EISDIR") in listed.damage


def test_a_digest_that_is_a_path_reads_no_other_file(tmp_path: Path) -> None:
    registry = open_registry(str(tmp_path))
    publish(registry)
    made = registry.get("tiny", 1)
    made.manifest["blobs"]["x"]["digest"] = "sha256:../../../publish.lock"
    with pytest.raises(Corrupt):
        registry.read_blob(made, "x")


def test_a_folder_that_is_moved_while_it_is_used_is_reported(tmp_path: Path) -> None:
    registry = open_registry(str(tmp_path / "registry"))
    publish(registry)
    shutil.move(tmp_path / "registry", tmp_path / "elsewhere")
    assert registry.aliases("tiny") == {"latest": 1}
    for call in (
        lambda: registry.set_alias("tiny", "stable", 1),
        lambda: publish(registry, "two"),
        lambda: publish(registry, "one"),
    ):
        with pytest.raises((Corrupt, Unavailable)):
            call()
    assert not (tmp_path / "registry").exists()


def test_a_folder_restored_from_a_backup_under_a_running_process_gets_no_gap(tmp_path: Path) -> None:
    registry = open_registry(str(tmp_path / "registry"))
    publish(registry)
    shutil.copytree(tmp_path / "registry", tmp_path / "backup")
    publish(registry, "two")
    shutil.rmtree(tmp_path / "registry")
    shutil.copytree(tmp_path / "backup", tmp_path / "registry")
    for call in (lambda: registry.set_alias("tiny", "stable", 1), lambda: publish(registry, "three")):
        with raises(Corrupt, "JOURNAL_INCOMPLETE"):
            call()
    assert [version.version for version in registry.list_versions("tiny")] == [2, 1]
    assert publish(open_registry(str(tmp_path / "registry")), "three") == 2


def test_open_registry_accepts_paths_and_file_urls(tmp_path: Path) -> None:
    made = publish(open_registry(str(tmp_path / "a b")))
    for name in (str(tmp_path / "a b"), f"file://{tmp_path}/a%20b", f"file://localhost{tmp_path}/a b"):
        with closing(open_registry(name)) as registry:
            assert registry.resolve("tiny", "latest").version == made
    for name in ("redis://localhost", "http://bucket", "", "file://elsewhere/path", "file://"):
        with pytest.raises(InvalidInput, match=r"file:///|path|objects=s3://"):
            open_registry(name)
    with pytest.raises(NotFound):
        open_registry(str(tmp_path / "new")).get("tiny", 1)
