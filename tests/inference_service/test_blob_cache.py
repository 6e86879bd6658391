"""A worker's cache of the blobs of a shared registry."""

import os
import threading
from pathlib import Path

import pytest

from inference_service.blob_cache import BlobCache
from shared.digests import digest_of
from shared.errors import Corrupt, Unavailable
from shared.registry.base import PublishedVersion


class Store:
    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.num_fetches = 0
        self.is_away = False

    def fetch(self, version: PublishedVersion, name: str) -> bytes:
        self.num_fetches += 1
        if self.is_away:
            raise Unavailable("away")
        return self.data[version.manifest["blobs"][name]["digest"]]

    def version(self, data: bytes) -> PublishedVersion:
        digest = digest_of(data)
        self.data[digest] = data
        manifest = {"blobs": {"x": {"digest": digest, "size_bytes": len(data)}}}
        return PublishedVersion("tiny", 1, "", 0.0, len(data), manifest)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def cache(store: Store, tmp_path: Path) -> BlobCache:
    return BlobCache(tmp_path / "cache", store.fetch, max_bytes=250)


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").iterdir())


def test_a_blob_is_fetched_once_and_read_by_later_processes_without_the_store(store, cache, tmp_path):
    version = store.version(b"weights" * 10)
    assert cache.read_blob(version, "x") == b"weights" * 10
    store.is_away = True
    other = BlobCache(tmp_path / "cache", store.fetch, max_bytes=250)
    assert other.read_blob(version, "x") == b"weights" * 10
    assert store.num_fetches == 1


@pytest.mark.parametrize("damage", [b"weightZ", b"", b"weights and more"])
def test_a_damaged_file_is_fetched_again(store, cache, tmp_path, damage):
    version = store.version(b"weights")
    cache.read_blob(version, "x")
    (path,) = files(tmp_path)
    path.write_bytes(damage)
    assert cache.read_blob(version, "x") == b"weights"
    assert store.num_fetches == 2
    assert path.read_bytes() == b"weights"


def test_the_least_recently_read_blob_is_evicted(store, cache, tmp_path):
    versions = [store.version(bytes([number]) * 100) for number in range(3)]
    for number in (0, 1):
        cache.read_blob(versions[number], "x")
    for age, version in enumerate(versions[:2]):
        name = version.manifest["blobs"]["x"]["digest"].removeprefix("sha256:")
        os.utime(tmp_path / "cache" / name, (1000 + age, 1000 + age))
    cache.read_blob(versions[0], "x")  # version 1 is now the least recently read
    cache.read_blob(versions[2], "x")
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 250
    fetched = store.num_fetches
    cache.read_blob(versions[0], "x")
    cache.read_blob(versions[2], "x")
    assert store.num_fetches == fetched
    cache.read_blob(versions[1], "x")
    assert store.num_fetches == fetched + 1


def test_a_blob_larger_than_the_cache_is_not_kept(store, cache, tmp_path):
    small, large = store.version(b"s" * 10), store.version(b"l" * 251)
    cache.read_blob(small, "x")
    assert cache.read_blob(large, "x") == b"l" * 251
    assert len(files(tmp_path)) == 1


def test_a_blob_is_written_and_synced_before_it_gets_its_name(store, cache, tmp_path, monkeypatch):
    """After a crash at any point, a file under a blob's name is complete or absent."""
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: order.append("sync") or fsync(fd))
    monkeypatch.setattr(Path, "rename", lambda path, to: order.append("rename") or rename(path, to))
    version = store.version(b"weights")
    cache.read_blob(version, "x")
    assert order == ["sync", "rename", "sync"], "the contents, the file and its folder are synced in this order"


def test_if_the_disk_fails_blobs_are_read_without_the_cache(store, cache, tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    version = store.version(b"weights")
    assert cache.read_blob(version, "x") == b"weights"
    assert files(tmp_path) == [], "no partial file may remain"


def test_a_digest_that_is_a_path_reads_no_other_file(store, cache):
    version = store.version(b"weights")
    version.manifest["blobs"]["x"]["digest"] = "sha256:../../secret"
    with pytest.raises(Corrupt):
        cache.read_blob(version, "x")
    assert store.num_fetches == 0


def test_several_threads_read_at_once(store, cache):
    versions = [store.version(bytes([number]) * 60) for number in range(8)]
    wrong: list[int] = []

    def read(seed: int) -> None:
        for turn in range(40):
            number = (seed * 7 + turn * 3) % 8
            if cache.read_blob(versions[number], "x") != bytes([number]) * 60:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
