import asyncio
import threading

import pytest

from inference_service.routers import RouterChoice, RouterStore
from shared.errors import Corrupt, NotFound, PreconditionFailed, RouterMismatch
from shared.registry.factory import open_registry
from tests.worker import build_ladder


@pytest.fixture
def registry(tmp_path):
    registry = open_registry(str(tmp_path / "registry"))
    yield registry
    registry.close()


class Unpacker:
    """Counts, and can be held up."""

    def __init__(self, loaded) -> None:
        self.loaded = loaded
        self.num_calls = 0
        self.go = threading.Event()
        self.go.set()
        self.threads: set[int] = set()

    def __call__(self, manifest, blobs):
        self.num_calls += 1
        self.threads.add(threading.get_ident())
        assert self.go.wait(10)
        assert blobs == {"ladder.safetensors": b"bytes of " + manifest["name"].encode()}
        return build_ladder(self.loaded, fingerprint=manifest["model"]["fingerprint"])


@pytest.fixture
def unpack(loaded):
    return Unpacker(loaded)


@pytest.fixture
def publish(registry, loaded):
    def publish(name, *, fingerprint=loaded.fingerprint, aliases=("latest",)):
        manifest = {"name": name, "model": {"fingerprint": fingerprint}}
        blobs = {"ladder.safetensors": b"bytes of " + name.encode()}
        return registry.publish("tiny", manifest, blobs, request_id=name, aliases=aliases)

    return publish


async def test_no_choice_means_latest(registry, loaded, publish, unpack):
    publish("first")
    second = publish("second")
    store = RouterStore(registry, unpack=unpack)
    router = await store.select(loaded, RouterChoice())
    assert (router.version, router.digest) == (2, second.manifest_digest)
    assert router.rungs == ("suffix",)
    assert (await store.select(loaded, RouterChoice(version=1))).version == 1
    registry.set_alias("tiny", "stable", 1)
    assert (await store.select(loaded, RouterChoice(alias="stable"))).version == 1
    assert unpack.num_calls == 2
    assert [router.version for router in store.loaded("tiny")] == [1, 2]
    assert store.loaded("other") == []


async def test_an_alias_is_resolved_for_every_request(registry, loaded, publish, unpack):
    store = RouterStore(registry, unpack=unpack)
    publish("first")
    assert (await store.select(loaded, RouterChoice())).version == 1
    publish("second")
    assert (await store.select(loaded, RouterChoice())).version == 2


async def test_nothing_published_says_how_to_calibrate(registry, loaded, unpack):
    store = RouterStore(registry, unpack=unpack)
    with pytest.raises(PreconditionFailed, match="neap calibrate") as caught:
        await store.select(loaded, RouterChoice())
    assert caught.value.reason == "ROUTER_REQUIRED"
    for choice in (RouterChoice(alias="latest"), RouterChoice(version=1)):
        with pytest.raises(NotFound):
            await store.select(loaded, choice)


async def test_a_router_of_another_model_is_refused_and_not_kept(registry, loaded, publish, unpack):
    publish("other", fingerprint="sha256:" + "0" * 64)
    store = RouterStore(registry, unpack=unpack)
    for _ in range(2):
        with pytest.raises(RouterMismatch):
            await store.select(loaded, RouterChoice())
    assert store.loaded("tiny") == []
    assert unpack.num_calls == 2


async def test_many_at_once_load_once_off_the_loop(registry, loaded, publish, unpack):
    publish("first")
    store = RouterStore(registry, unpack=unpack)
    unpack.go.clear()
    waiting = [asyncio.create_task(store.select(loaded, RouterChoice())) for _ in range(8)]
    while unpack.num_calls == 0:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    waiting[0].cancel()  # one that leaves takes nobody along
    await asyncio.sleep(0)
    unpack.go.set()
    routers = await asyncio.gather(*waiting[1:])
    assert unpack.num_calls == 1
    assert len({id(router) for router in routers}) == 1
    assert threading.get_ident() not in unpack.threads


async def test_the_least_recently_used_goes(registry, loaded, publish, unpack):
    for name in ("first", "second", "third"):
        publish(name)
    store = RouterStore(registry, capacity=2, unpack=unpack)
    for version in (1, 2, 1, 3):
        await store.select(loaded, RouterChoice(version=version))
    assert [router.version for router in store.loaded("tiny")] == [1, 3]
    assert unpack.num_calls == 3
    await store.select(loaded, RouterChoice(version=2))
    assert unpack.num_calls == 4


async def test_a_flipped_byte_is_found_and_its_repair_too(
    registry, loaded, publish, unpack, tmp_path
):
    publish("first")
    (blob,) = [
        path
        for path in (tmp_path / "registry" / "blobs").rglob("*")
        if path.is_file() and path.read_bytes() == b"bytes of first"
    ]
    blob.chmod(0o644)
    blob.write_bytes(b"bytes of firsT")
    store = RouterStore(registry, unpack=unpack)
    with pytest.raises(Corrupt):
        await store.select(loaded, RouterChoice())
    assert unpack.num_calls == 0
    blob.write_bytes(b"bytes of first")
    assert (await store.select(loaded, RouterChoice())).version == 1
