import asyncio
import collections
import gc
import threading
import weakref

import pytest
import structlog

from inference_service import router_loader
from inference_service.resolutions import takes_canary
from inference_service.router_loader import RouterLoader
from inference_service.routers import RouterChoice, RouterStore
from shared.errors import Corrupt, NotFound, PreconditionFailed, RouterMismatch
from shared.ladder.artefact import pack_ladder
from shared.ladder.blob_names import STATISTICS_BLOB
from shared.registry.base import Canary, PublishedVersion
from shared.registry.factory import open_registry
from tests.few_ladders import FewLadders
from tests.random_ladder import random_ladder
from tests.registry_damage import content_path
from tests.waiting import wait_until_async
from tests.worker import build_ladder


class Unpacker:
    """Counts its calls, and can be blocked."""

    def __init__(self, loaded) -> None:
        self.loaded = loaded
        self.num_calls = 0
        self.go = threading.Event()
        self.go.set()
        self.threads: set[int] = set()

    def __call__(self, manifest, blobs, heads):
        self.num_calls += 1
        self.threads.add(threading.get_ident())
        assert self.go.wait(60)
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
    assert router.proposers == ("prompt-lookup",)
    assert (await store.select(loaded, RouterChoice(version=1))).version == 1
    registry.set_alias("tiny", "stable", 1)
    assert (await store.select(loaded, RouterChoice(alias="stable"))).version == 1
    assert unpack.num_calls == 2
    assert [router.version for router in store.loaded("tiny")] == [1, 2]
    assert store.loaded("other") == []


async def served(store, loaded, version, choice=None, **options):
    """Returns once requests get `version`."""

    async def is_served():
        router = await store.select(loaded, choice or RouterChoice(), **options)
        return router.version == version

    await wait_until_async(is_served)


async def test_an_alias_that_moves_serves_its_old_version_until_the_new_one_is_ready(registry, loaded, publish, unpack):
    fallbacks = []
    store = RouterStore(registry, unpack=unpack, on_fallback=lambda *labels: fallbacks.append(labels))
    prepared = []
    store.bind_with("tiny", FewLadders(on_prepare=prepared.append))
    publish("first")
    first = await store.select(loaded, RouterChoice())
    assert prepared == [first.ladder]
    publish("second")
    unpack.go.clear()
    for _ in range(5):
        assert (await store.select(loaded, RouterChoice())).ladder is first.ladder
    assert fallbacks == [("tiny", "alias", "LOADING")] * 5
    unpack.go.set()
    await served(store, loaded, 2)
    assert unpack.num_calls == 2
    assert len(prepared) == 2
    registry.rollback_alias("tiny", "latest")
    assert (await store.select(loaded, RouterChoice())).ladder is first.ladder, "it is still there"


async def test_a_router_of_the_former_form_leaves_what_served_before(registry, loaded):
    manifest, blobs = pack_ladder(random_ladder(loaded, 1, (0,)), {})
    registry.publish("tiny", manifest, blobs, request_id="now", aliases=("latest",))
    fallbacks = []
    store = RouterStore(registry, on_fallback=lambda *labels: fallbacks.append(labels))
    first = await store.select(loaded, RouterChoice())
    former = {**manifest, "schema_version": 3}
    registry.publish("tiny", former, blobs, request_id="former", aliases=("latest",))

    async def is_refused():
        assert (await store.select(loaded, RouterChoice())).ladder is first.ladder
        return fallbacks[-1] == ("tiny", "alias", "SCHEMA_TOO_OLD")

    await wait_until_async(is_refused)
    for just_started, choice in ((RouterStore(registry), RouterChoice()), (store, RouterChoice(version=2))):
        with pytest.raises(PreconditionFailed, match="calibrate the model again") as caught:
            await just_started.select(loaded, choice)
        assert caught.value.reason == "SCHEMA_TOO_OLD"


async def test_a_router_that_fails_its_self_test_never_serves(registry, loaded, publish, unpack):
    def refuse_later_ones(ladder):
        if unpack.num_calls > 1:
            raise Corrupt("no", reason="SELF_TEST_FAILED")

    fallbacks = []
    store = RouterStore(registry, unpack=unpack, on_fallback=lambda *labels: fallbacks.append(labels))
    store.bind_with("tiny", FewLadders(on_prepare=refuse_later_ones))
    publish("first")
    await store.select(loaded, RouterChoice())
    publish("second")

    async def is_refused():
        assert (await store.select(loaded, RouterChoice())).version == 1
        return ("tiny", "alias", "SELF_TEST_FAILED") in fallbacks

    await wait_until_async(is_refused)
    for _ in range(20):
        assert (await store.select(loaded, RouterChoice())).version == 1
    assert unpack.num_calls == 2, "what is broken is not loaded for every request"
    with pytest.raises(Corrupt):
        await store.select(loaded, RouterChoice(version=2))


IDS = [f"request-{number}" for number in range(400)]


async def test_a_canary_gets_its_share_the_same_ids_on_every_worker(registry, loaded, publish, unpack):
    publish("first", aliases=("stable",))
    publish("second", aliases=())
    registry.set_canary("tiny", "stable", Canary(2, 250))
    chosen = []
    for _ in range(2):
        store = RouterStore(registry, unpack=unpack, default_alias="stable")
        mine = next(name for name in IDS if takes_canary(name, "tiny", "stable", Canary(2, 250)))
        await served(store, loaded, 2, request_id=mine)
        routers = [await store.select(loaded, RouterChoice(), request_id=name) for name in IDS]
        chosen.append([router.version for router in routers])
    assert chosen[0] == chosen[1]
    assert 60 < chosen[0].count(2) < 140
    assert chosen[0].count(1) + chosen[0].count(2) == len(IDS)
    assert [router.version for router in store.loaded("tiny")] == [1, 2], "both are held"
    registry.promote_canary("tiny", "stable")
    assert {(await store.select(loaded, RouterChoice(), request_id=n)).version for n in IDS} == {2}


@pytest.mark.parametrize(
    ("fault", "reason"), [("fingerprint", "ROUTER_MISMATCH"), ("blob", "CORRUPT"), ("missing", "CORRUPT")]
)
async def test_a_broken_canary_fails_no_request(registry, loaded, publish, unpack, tmp_path, fault, reason):
    publish("first", aliases=("stable",))
    other = {"fingerprint": "sha256:" + "0" * 64} if fault == "fingerprint" else {}
    publish("second", aliases=(), **other)
    for path in (tmp_path / "registry" / "blobs").rglob("*"):
        if path.is_file() and path.read_bytes() == b"bytes of second" and fault != "fingerprint":
            path.chmod(0o644)
            path.write_bytes(b"bytes of secOnd") if fault == "blob" else path.unlink()
    registry.set_canary("tiny", "stable", Canary(2, 500))
    fallbacks = collections.Counter()
    store = RouterStore(
        registry, unpack=unpack, default_alias="stable", on_fallback=lambda *labels: fallbacks.update([labels])
    )

    async def is_refused():
        for name in IDS:
            router = await store.select(loaded, RouterChoice(), request_id=name)
            assert router.version == 1
        return fallbacks["tiny", "canary", reason]

    await wait_until_async(is_refused)
    assert set(fallbacks) <= {("tiny", "canary", "LOADING"), ("tiny", "canary", reason)}


async def test_a_loaded_router_is_served_although_its_artefact_is_damaged(registry, loaded, publish, unpack, tmp_path):
    digest = publish("first").manifest_digest
    store = RouterStore(registry, unpack=unpack)
    first = await store.select(loaded, RouterChoice())
    (tmp_path / "registry" / content_path("manifests", digest)).unlink()
    assert (await store.select(loaded, RouterChoice())).ladder is first.ladder
    await store.refresh(loaded)
    anew = open_registry(str(tmp_path / "registry"))
    with pytest.raises(Corrupt) as raised:
        await RouterStore(anew, unpack=unpack).select(loaded, RouterChoice())
    assert raised.value.metadata["expected_digest"] == digest
    publish("second")
    await served(store, loaded, 2)


async def test_refreshing_loads_before_a_request_asks(registry, loaded, publish, unpack):
    fallbacks = []
    store = RouterStore(registry, unpack=unpack, on_fallback=lambda *labels: fallbacks.append(labels))
    publish("first")
    await store.select(loaded, RouterChoice())
    publish("second")
    publish("third", aliases=())
    registry.set_canary("tiny", "latest", Canary(3, 1))
    await store.refresh(loaded)
    await wait_until_async(lambda: len(store.loaded("tiny")) == 3)
    assert (await store.select(loaded, RouterChoice())).version == 2
    assert fallbacks == []


async def test_an_artefact_that_is_too_large_is_not_read(registry, loaded, publish, unpack, monkeypatch):
    monkeypatch.setattr(router_loader, "MAX_BLOB_BYTES", 10)
    publish("first")
    read = []
    store = RouterStore(registry, unpack=unpack, read_blob=lambda *args: read.append(args))
    with pytest.raises(Corrupt) as caught:
        await store.select(loaded, RouterChoice())
    assert (caught.value.reason, read) == ("ROUTER_TOO_LARGE", [])


async def test_statistics_are_neither_fetched_nor_counted(registry, loaded, unpack, monkeypatch):
    monkeypatch.setattr(router_loader, "MAX_BLOB_BYTES", 100)
    manifest = {"name": "first", "model": {"fingerprint": loaded.fingerprint}}
    blobs = {"ladder.safetensors": b"bytes of first", STATISTICS_BLOB: b"sum" * 100}
    registry.publish("tiny", manifest, blobs, request_id="first")
    read: list[str] = []

    def read_blob(version: PublishedVersion, name: str) -> bytes:
        read.append(name)
        return registry.read_blob(version, name)

    store = RouterStore(registry, unpack=unpack, read_blob=read_blob)
    assert (await store.select(loaded, RouterChoice())).version == 1
    assert read == ["ladder.safetensors"]


async def test_nothing_published_is_no_router_where_none_is_named(registry, loaded, publish, unpack):
    fallbacks = []
    store = RouterStore(registry, unpack=unpack, on_fallback=lambda *labels: fallbacks.append(labels))
    assert await store.select(loaded, RouterChoice()) is None
    assert fallbacks == [("tiny", "default", "ALIAS_NOT_FOUND")]
    for choice in (RouterChoice(alias="latest"), RouterChoice(version=1)):
        with pytest.raises(NotFound):
            await store.select(loaded, choice)
    publish("first")
    assert (await store.select(loaded, RouterChoice())).version == 1
    assert len(fallbacks) == 1


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
    await wait_until_async(lambda: unpack.num_calls and store.num_waiting == 8)
    waiting[0].cancel()  # one that leaves takes nobody along
    await asyncio.sleep(0)
    unpack.go.set()
    routers = await asyncio.gather(*waiting[1:])
    assert unpack.num_calls == 1
    assert len({id(router.ladder) for router in routers}) == 1
    assert threading.get_ident() not in unpack.threads


async def test_the_least_recently_used_goes(registry, loaded, publish, unpack):
    for name in ("first", "second", "third"):
        publish(name)
    store = RouterStore(registry, unpack=unpack)
    store.bind_with("tiny", FewLadders(2))
    for version in (1, 2, 1, 3):
        await store.select(loaded, RouterChoice(version=version))
    assert [router.version for router in store.loaded("tiny")] == [1, 3]
    assert unpack.num_calls == 3
    await store.select(loaded, RouterChoice(version=2))
    assert unpack.num_calls == 4


async def test_a_flipped_byte_is_found_and_its_repair_too(registry, loaded, publish, unpack, tmp_path):
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


async def test_aliases_hold_no_more_routers_than_are_kept(registry, loaded, publish, unpack):
    store = RouterStore(registry, unpack=unpack, default_alias="a0")
    store.bind_with("tiny", FewLadders(2))
    held = []
    for number in range(5):
        publish(f"v{number}", aliases=(f"a{number}",))
        router = await store.select(loaded, RouterChoice(alias=f"a{number}"))
        held.append(weakref.ref(router.ladder))
    del router
    gc.collect()
    assert sum(reference() is not None for reference in held) == 2
    assert [router.version for router in store.loaded("tiny")] == [1, 5], "the default's and the newest"
    assert (await store.select(loaded, RouterChoice(alias="a2"))).version == 3


async def test_refreshing_does_not_reload_evicted_routers(registry, loaded, publish, unpack):
    store = RouterStore(registry, unpack=unpack)
    store.bind_with("tiny", FewLadders(2))
    for name in ("first", "second", "third"):
        publish(name, aliases=(name,))
    await store.select(loaded, RouterChoice(alias="first"))
    for version in (2, 3):  # of which the second evicts what the alias serves
        await store.select(loaded, RouterChoice(version=version))
    await store.refresh(loaded)
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})  # loads
    assert unpack.num_calls == 3


async def test_versions_that_clients_make_up_leave_nothing_behind(registry, loaded, unpack):
    loader = RouterLoader(registry, unpack=unpack)
    num_versions = router_loader.MAX_FAILURES + 2
    with structlog.testing.capture_logs() as logs:
        for version in range(1, num_versions + 1):
            with pytest.raises(NotFound):
                await loader.get(loaded, version)
    assert logs == []
    assert loader.get_soon(loaded, 1) == "LOADING", "its failure is forgotten"
    assert loader.get_soon(loaded, num_versions) == "ROUTER_VERSION_NOT_FOUND"


async def test_a_router_that_cannot_be_loaded_is_logged_at_intervals(registry, loaded, publish, unpack):
    publish("other", fingerprint="sha256:" + "0" * 64)
    store = RouterStore(registry, unpack=unpack)
    with structlog.testing.capture_logs() as logs:
        for _ in range(20):
            with pytest.raises(RouterMismatch):
                await store.select(loaded, RouterChoice())
    assert [entry["reason"] for entry in logs] == ["ROUTER_MISMATCH"]
