"""A worker has its routers before it is ready, so its first requests are not refused."""

import asyncio
from contextlib import closing

import pytest
import structlog

from inference_service.routers import RouterChoice, RouterStore, preload_routers
from shared.errors import Corrupt, Exhausted, InvalidInput, NotFound, Unavailable
from shared.registry.base import Canary
from shared.registry.factory import open_registry
from tests.few_ladders import FewLadders
from tests.registry_damage import content_path
from tests.waiting import wait_until_async
from tests.worker import build_ladder


class Counted:
    """A registry that can be away. Counts the blobs that are read."""

    def __init__(self, registry) -> None:
        self.registry = registry
        self.is_away = self.is_store_away = False
        self.num_asked = 0

    def aliases(self, model_id):
        return self._answer().aliases(model_id)

    def target(self, model_id, alias):
        return self._answer().target(model_id, alias)

    def models(self):
        return self._answer().models()

    def list_versions(self, model_id, **options):
        return self._answer().list_versions(model_id, **options)

    def get(self, model_id, version):
        return self._answer().get(model_id, version)

    def read_blob(self, version, name):
        if self.is_store_away:
            self.num_asked += 1
            raise Unavailable("away", reason="OBJECT_STORE_UNAVAILABLE")
        return self._answer().read_blob(version, name)

    def _answer(self):
        self.num_asked += 1
        if self.is_away:
            raise Unavailable("away", reason="REDIS_UNAVAILABLE")
        return self.registry


@pytest.fixture
def registry(tmp_path):
    with closing(open_registry(str(tmp_path / "registry"))) as registry:
        yield Counted(registry)


@pytest.fixture
def publish(loaded, registry):
    def publish(name, *aliases, fingerprint=loaded.fingerprint):
        manifest = {"model": {"fingerprint": fingerprint}}
        made = registry.registry.publish("tiny", manifest, {"x": name.encode()}, request_id=name, aliases=aliases)
        return made.version

    return publish


@pytest.fixture
def store(registry, loaded):
    def make(capacity=4, **options):
        made = RouterStore(
            registry,
            unpack=lambda manifest, blobs, heads: build_ladder(loaded, fingerprint=manifest["model"]["fingerprint"]),
            max_waiting=1,
            **options,
        )
        made.bind_with("tiny", FewLadders(capacity))
        return made

    return make


def versions(store):
    return [router.version for router in store.loaded("tiny")]


async def burst(store, loaded, choice, count=48):
    """The version that each of so many requests got at once, or its error."""
    found = await asyncio.gather(*(store.select(loaded, choice) for _ in range(count)), return_exceptions=True)
    return {getattr(result, "version", result) for result in found}


@pytest.mark.parametrize("alias", [None, "latest", "stable"])
async def test_no_request_of_the_first_burst_waits_for_a_router(registry, store, loaded, publish, alias):
    publish("first", "latest", "stable")
    cold = store()
    refused = await burst(cold, loaded, RouterChoice(alias=alias))
    assert any(isinstance(error, Exhausted) for error in refused), "as without"
    warm = store()
    await preload_routers(warm, [loaded], None, timeout_s=None)
    assert await burst(warm, loaded, RouterChoice(alias=alias)) == {1}
    registry.is_away = True
    assert await burst(warm, loaded, RouterChoice(alias=alias)) == {1}, "it knows what they name"


async def test_the_default_alias_comes_first_then_the_newest_versions(store, loaded, publish):
    publish("1", "default")
    for number in range(2, 7):
        publish(str(number), f"a{number}")
    routers = store(default_alias="default", capacity=3)
    await routers.preload([loaded])
    assert versions(routers) == [1, 5, 6]
    await routers.preload([loaded])
    assert versions(routers) == [1, 5, 6]
    assert await burst(routers, loaded, RouterChoice(alias="a5")) == {5}


async def test_named_aliases_and_canaries(registry, store, loaded, publish):
    for number in range(1, 6):
        publish(str(number), "latest", f"a{number}")
    registry.registry.set_canary("tiny", "a2", Canary(3, 500))
    routers = store()
    await routers.preload([loaded], ["a2", "unknown"])
    assert versions(routers) == [2, 3, 5]
    full = store(capacity=2)
    await full.preload([loaded], ["a2", "a4"])
    assert versions(full) == [4, 5], "an alias and its canary do not both fit"


async def test_an_empty_registry_delays_nothing_and_the_first_publication_is_loaded(store, loaded, publish):
    routers = store()
    await preload_routers(routers, [loaded], None, timeout_s=None)
    assert await routers.select(loaded, RouterChoice()) is None
    publish("first", "latest")
    await routers.refresh(loaded)
    assert await burst(routers, loaded, RouterChoice()) == {1}


async def test_routers_of_the_same_weights_under_other_ids_are_named(store, loaded, registry):
    for model_id, fingerprint in (("theirs", "other"), ("ours", loaded.fingerprint), ("older", "")):
        manifest = {"model": {"fingerprint": fingerprint}} if fingerprint else {}
        registry.registry.publish(model_id, manifest, {"x": b"x"}, request_id=model_id)
    with structlog.testing.capture_logs() as logs:
        await preload_routers(store(), [loaded], None, timeout_s=None)
    assert [entry["published_as"] for entry in logs if "published_as" in entry] == [["ours"]]


@pytest.mark.parametrize("damage", ["other model", "truncated"])
async def test_a_router_that_cannot_be_loaded_does_not_stop_the_worker(store, loaded, publish, damage, tmp_path):
    publish("good", "stable")
    version = publish("bad", "latest", fingerprint="other" if damage == "other model" else "")
    if damage == "truncated":
        published = open_registry(str(tmp_path / "registry")).get("tiny", version)
        path = tmp_path / "registry" / content_path("manifests", published.manifest_digest)
        path.write_bytes(b"{")
    routers = store()
    with structlog.testing.capture_logs() as logs:
        await preload_routers(routers, [loaded], None, timeout_s=None)
    assert versions(routers) == [1]
    (entry,) = [entry for entry in logs if entry["event"] == "no router was loaded in advance"]
    assert (entry["alias"], entry["exc_info"]) == ("latest", False)


async def test_an_unexpected_error_does_not_stop_the_worker(registry, store, loaded, publish):
    publish("first", "latest", "stable")
    target = registry.target

    def broken(model_id, alias):
        if alias == "latest":
            raise TypeError("a fault of ours")
        return target(model_id, alias)

    registry.target = broken
    routers = store()
    with structlog.testing.capture_logs() as logs:
        await preload_routers(routers, [loaded], None, timeout_s=None)
    assert versions(routers) == [1]
    assert [entry["reason"] for entry in logs if "exc_info" in entry] == ["INTERNAL"]
    assert not [entry for entry in logs if "published_as" in entry], "its own id is no other"


@pytest.mark.parametrize("error", [InvalidInput("bad id"), Corrupt("damaged"), TypeError("a fault")])
async def test_a_registry_that_refuses_every_question_does_not_stop_the_worker(registry, store, loaded, error):
    def refuse(*_):
        raise error

    registry.aliases = registry.target = refuse
    await preload_routers(store(), [loaded], None, timeout_s=None)
    with pytest.raises(type(error)):
        await store().select(loaded, RouterChoice())


@pytest.mark.parametrize("part", ["is_away", "is_store_away"])
async def test_a_worker_waits_for_its_registry(registry, store, loaded, publish, part):
    publish("first", "latest")
    setattr(registry, part, True)
    routers = store()
    waiting = asyncio.create_task(preload_routers(routers, [loaded], None, timeout_s=None, pause_s=0.01))
    await wait_until_async(lambda: registry.num_asked > 4)
    assert not waiting.done()
    setattr(registry, part, False)
    await waiting
    assert await burst(routers, loaded, RouterChoice()) == {1}


async def test_a_worker_that_may_not_wait_serves_without_routers(registry, store, loaded, publish):
    publish("first", "latest")
    registry.is_away = True
    routers = store()
    await preload_routers(routers, [loaded], None, timeout_s=0.0)
    with pytest.raises(Unavailable):
        await routers.select(loaded, RouterChoice())
    registry.is_away = False
    await routers.refresh(loaded)
    assert await burst(routers, loaded, RouterChoice()) == {1}
    with pytest.raises(NotFound):
        await routers.select(loaded, RouterChoice(alias="stable"))
