"""While the registry is away, the last answers are used; its other errors are raised."""

import asyncio
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import structlog
from neap_client import NeapClient

from inference_service import router_loader
from inference_service.pools import NUM_REGISTRY_THREADS, Pools
from inference_service.resolutions import Resolutions, takes_canary
from inference_service.routers import RouterChoice, RouterStore
from shared.engine.engine import Engine
from shared.errors import InvalidInput, NotFound, PreconditionFailed, Unavailable
from shared.registry.base import Canary
from shared.registry.factory import open_registry
from shared.registry.names import check_alias
from tests.generation import EXACT, request_of
from tests.registry_servers import shared_url
from tests.waiting import wait_until, wait_until_async
from tests.worker import build_ladder, serving


class Flaky:
    """A registry that can be away, hang, or raise NotFound."""

    def __init__(self, registry) -> None:
        self.registry = registry
        self.error: Exception | None = None
        self.store_error: Exception | None = None
        self.go = threading.Event()
        self.go.set()
        self.num_asked = 0

    def target(self, model_id, alias):
        check_alias(alias)  # as every registry does before it asks anybody
        self.num_asked += 1
        self.go.wait(60)
        if self.error is not None:
            raise self.error
        return self.registry.target(model_id, alias)

    def get(self, model_id, version):
        return self.registry.get(model_id, version)

    def read_blob(self, version, name):
        if self.store_error is not None:
            raise self.store_error
        return self.registry.read_blob(version, name)


@pytest.fixture
def registry(tmp_path):
    with closing(open_registry(str(tmp_path / "registry"))) as registry:
        yield Flaky(registry)


@pytest.fixture
def publish(loaded, registry):
    def publish(name, into=registry.registry):
        manifest = {"model": {"fingerprint": loaded.fingerprint}}
        return into.publish("tiny", manifest, {"x": name.encode()}, request_id=name)

    return publish


@pytest.fixture
def stale():
    """The model of each request that was served by a kept answer."""
    return []


@pytest.fixture
def store(registry, loaded, stale):
    return RouterStore(registry, unpack=lambda manifest, blobs, heads: build_ladder(loaded), on_stale=stale.append)


async def test_the_last_answer_is_used_while_the_registry_is_away(registry, store, loaded, publish, stale):
    publish("first")
    assert (await store.select(loaded, RouterChoice())).version == 1
    registry.error = Unavailable("away")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            assert (await store.select(loaded, RouterChoice())).version == 1
    assert stale == [loaded.model_id] * 3
    (entry,) = [entry for entry in logs if "age_s" in entry]
    assert entry["version"] == 1
    assert registry.num_asked == 2, "known to be away, it is not asked for every request"
    with pytest.raises(Unavailable):
        await store.select(loaded, RouterChoice(alias="stable"))


async def test_that_there_is_no_router_is_remembered_while_the_registry_is_away(
    registry, store, loaded, publish, stale
):
    assert await store.select(loaded, RouterChoice()) is None
    registry.error = Unavailable("away")
    for _ in range(2):
        assert await store.select(loaded, RouterChoice()) is None
    assert stale == [loaded.model_id] * 2
    with pytest.raises(Unavailable):
        await store.select(loaded, RouterChoice(alias="stable"))


@pytest.fixture
def resolve(registry):
    """Makes a function that resolves "latest" to a version, with its own `Resolutions`."""
    pools = Pools()

    def make(**options):
        known = Resolutions(registry.target, pools.known_aliases, pools.new_aliases, **options)

        async def resolve():
            resolution = await known.resolve("tiny", "latest")
            known.keep("tiny", "latest", resolution)
            return resolution.target.published.version

        return resolve

    yield make
    registry.go.set()
    pools.close()


async def test_the_registry_is_asked_again_and_its_answer_used(registry, resolve, publish):
    latest = resolve(ask_again_s=0.0)
    publish("first")
    await latest()
    registry.error = Unavailable("away")
    assert await latest() == 1
    publish("second")
    registry.error = None

    async def is_seen():
        return await latest() == 2

    await wait_until_async(is_seen)


@pytest.mark.parametrize("error", [NotFound("gone"), PreconditionFailed("newer")])
async def test_every_other_error_is_raised(registry, store, loaded, publish, stale, error):
    publish("first")
    await store.select(loaded, RouterChoice(alias="latest"))
    registry.error = error
    with pytest.raises(type(error)):
        await store.select(loaded, RouterChoice(alias="latest"))
    assert stale == []


async def test_a_registry_that_hangs_costs_one_wait(registry, resolve, publish):
    latest = resolve(patience_s=0.05, ask_again_s=3600.0)
    publish("first")
    await latest()
    registry.go.clear()
    assert [await latest() for _ in range(20)] == [1] * 20
    assert registry.num_asked <= 2


async def test_an_invalid_alias_is_no_answer_of_a_registry_that_hangs(registry, publish):
    pools = Pools()
    known = Resolutions(registry.target, pools.known_aliases, pools.new_aliases, patience_s=0.05, ask_again_s=3600.0)
    publish("first")
    known.keep("tiny", "latest", await known.resolve("tiny", "latest"))
    registry.go.clear()
    try:
        for alias in ("Latest", "", "7", "a/b", "..", "x" * 65, "é", "a\n"):
            assert (await known.resolve("tiny", "latest")).target.published.version == 1
            with pytest.raises(InvalidInput):
                await known.resolve("tiny", alias)
        await known.resolve("tiny", "latest")
        assert registry.num_asked == 2, "known to be away, it is not asked for every request"
    finally:
        registry.go.set()
        pools.close()


async def test_an_invalid_alias_is_refused_although_every_lookup_hangs(registry, store, loaded, publish):
    registry.go.clear()
    lookups = [
        asyncio.create_task(store.select(loaded, RouterChoice(alias=f"a{number}")))
        for number in range(NUM_REGISTRY_THREADS)
    ]
    await wait_until_async(lambda: registry.num_asked == len(lookups))
    for alias in ("Latest", "", "7"):
        with pytest.raises(InvalidInput, match="alias"):
            await store.select(loaded, RouterChoice(alias=alias))
    registry.go.set()
    for result in await asyncio.gather(*lookups, return_exceptions=True):
        assert isinstance(result, NotFound)


async def test_an_alias_that_moved_to_a_version_that_cannot_be_fetched(registry, loaded, publish, monkeypatch):
    monkeypatch.setattr(router_loader, "RETRY_AWAY_S", 0.02)
    fallbacks = []
    store = RouterStore(
        registry,
        unpack=lambda manifest, blobs, heads: build_ladder(loaded),
        on_fallback=lambda *labels: fallbacks.append(labels),
    )
    publish("first")
    await store.select(loaded, RouterChoice())
    publish("second")
    registry.store_error = Unavailable("the store is away", reason="OBJECT_STORE_UNAVAILABLE")

    async def served():
        return (await store.select(loaded, RouterChoice())).version

    async def is_tried():
        assert await served() == 1
        return ("tiny", "alias", "OBJECT_STORE_UNAVAILABLE") in fallbacks

    async def is_loaded():
        return await served() == 2

    await wait_until_async(is_tried)
    assert fallbacks[0] == ("tiny", "alias", "LOADING")
    with pytest.raises(Unavailable):
        await store.select(loaded, RouterChoice(version=2))
    registry.store_error = None
    await wait_until_async(is_loaded)


def test_a_worker_serves_on_when_redis_is_killed(loaded, publish, own_redis, s3, stale):
    def answer(client):
        events = list(client.generate(request_of(4, depth=EXACT)))
        tokens = [token.id for event in events for token in event.chunk.tokens]
        return events[0].started.router_version, tokens

    with closing(open_registry(shared_url(own_redis, s3))) as registry:
        publish("first", registry)
        options = {"unpack": lambda manifest, blobs, heads: build_ladder(loaded), "on_stale": stale.append}
        with (
            Engine(loaded) as engine,
            serving(engine, registry, **options) as worker,
            NeapClient(worker.target) as client,
        ):
            before = answer(client)
            own_redis.kill()
            assert [answer(client) for _ in range(5)] == [before] * 5
            assert len(stale) == 5
            own_redis.start()
            publish("second", registry)
            wait_until(lambda: answer(client)[0] == 2)


IDS = [f"request-{number}" for number in range(20_000)]


def taken(canary: Canary, *, model: str = "tiny", alias: str = "stable") -> set[str]:
    return {name for name in IDS if takes_canary(name, model, alias, canary)}


@pytest.mark.parametrize("share", [1, 10, 100, 500, 999])
def test_a_canary_gets_its_share_of_requests(share: int) -> None:
    expected = len(IDS) * share / 1000
    deviation = (len(IDS) * share / 1000 * (1 - share / 1000)) ** 0.5
    assert abs(len(taken(Canary(2, share))) - expected) <= 5 * deviation


def test_a_larger_share_includes_the_requests_of_a_smaller_one() -> None:
    assert taken(Canary(2, 100)) < taken(Canary(2, 300))


def test_the_requests_of_a_canary_depend_on_version_alias_and_model() -> None:
    here = taken(Canary(2, 100))
    for other in (taken(Canary(3, 100)), taken(Canary(2, 100), alias="other"), taken(Canary(2, 100), model="other")):
        assert 0.05 < len(here & other) / len(here) < 0.15


def test_another_process_chooses_the_same_requests() -> None:
    """Python's hash() of a string differs between processes, so it must not decide."""
    program = (
        "from shared.registry.base import Canary; from inference_service.resolutions import takes_canary;"
        "print([n for n in range(200) if takes_canary(f'request-{n}', 'tiny', 'stable', Canary(2, 100))])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    here = [n for n in range(200) if takes_canary(f"request-{n}", "tiny", "stable", Canary(2, 100))]
    assert told.stdout.strip() == str(here)
    assert here[:4] == [0, 2, 3, 19], "workers of different versions of neap may serve at the same time"
