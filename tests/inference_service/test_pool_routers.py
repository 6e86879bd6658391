"""Callers of a pool get its router before the model's, and no other pool's."""

import grpc
import pytest
from neap_client.inference.v1 import inference_pb2_grpc

from inference_service.routers import RouterChoice, RouterStore
from shared.engine.engine import Engine
from shared.errors import NotFound, PermissionDenied, Unavailable
from shared.ladder.artefact import pack_ladder
from shared.registry.base import Canary
from shared.rpc.access import Access
from shared.rpc.callers import Role
from shared.rpc.security import ServerSecurity
from tests.generation import EXACT, answer, request_of
from tests.reasons import raises
from tests.tokens import bearer, write_tokens
from tests.worker import build_ladder, serving

POOLS = {"ann": "legal", "bob": "shop", "eve": "default"}
LONG = "a prompt that is long enough to be kept for others that begin as it does"


@pytest.fixture
def publish(registry, loaded):
    def publish(name, *aliases, pool=""):
        manifest, blobs = pack_ladder(build_ladder(loaded), {"name": name})
        manifest |= {"pool": pool} if pool else {}
        return registry.publish("tiny", manifest, blobs, request_id=name, aliases=aliases).version

    return publish


async def test_a_pool_has_its_own_alias_before_the_model_s(registry, loaded, publish):
    models, legal, stable = publish("one", "latest"), publish("two", "latest@legal"), publish("three", "stable")
    store = RouterStore(registry)

    async def version(pool, **choice):
        return (await store.select(loaded, RouterChoice(**choice), pool=pool)).version

    assert [await version(pool) for pool in POOLS.values()] == [legal, models, models]
    assert await version("legal", alias="latest") == legal
    assert await version("legal", alias="latest@legal") == legal
    assert await version("legal", alias="stable") == stable
    for pool in ("shop", "default"):
        with raises(PermissionDenied, "POOL_NOT_ALLOWED"):
            await version(pool, alias="latest@legal")
    with pytest.raises(NotFound):
        await version("shop", alias="latest@shop")
    registry.set_alias("tiny", "stable@shop", models)
    assert await version("shop", alias="stable") == models


async def test_a_version_that_has_learned_from_a_pool_serves_no_other(registry, loaded, publish):
    """However it is named."""
    own, legal = publish("one"), publish("two", pool="legal")
    store = RouterStore(registry)
    for pool in ("legal", "shop", "default"):
        assert (await store.select(loaded, RouterChoice(version=own), pool=pool)).version == own
    assert (await store.select(loaded, RouterChoice(version=legal), pool="legal")).version == legal
    for pool in ("shop", "default"):
        with raises(PermissionDenied, "POOL_NOT_ALLOWED"):
            await store.select(loaded, RouterChoice(version=legal), pool=pool)


async def test_a_pool_without_a_router_of_its_own_gets_one_as_soon_as_there_is_one(registry, loaded, publish):
    fallbacks = []
    store = RouterStore(registry, on_fallback=lambda *labels: fallbacks.append(labels))
    assert await store.select(loaded, RouterChoice(), pool="legal") is None
    publish("one", "latest")
    assert (await store.select(loaded, RouterChoice(), pool="legal")).version == 1
    publish("two", "latest@legal")
    assert (await store.select(loaded, RouterChoice(), pool="legal")).version == 2
    assert (await store.select(loaded, RouterChoice(), pool="shop")).version == 1
    assert fallbacks == [("tiny", "default", "ALIAS_NOT_FOUND")]


async def test_while_the_registry_does_not_say_the_model_s_router_serves(registry, loaded, publish, monkeypatch):
    publish("one", "latest")
    fallbacks = []
    store = RouterStore(registry, on_fallback=lambda *labels: fallbacks.append(labels))
    assert (await store.select(loaded, RouterChoice())).version == 1
    target = store._resolutions._resolve

    def resolve(model_id, alias):
        if "@" in alias:
            raise Unavailable("no answer", reason="OBJECT_STORE_UNAVAILABLE")
        return target(model_id, alias)

    monkeypatch.setattr(store._resolutions, "_resolve", resolve)
    assert (await store.select(loaded, RouterChoice(), pool="legal")).version == 1
    assert fallbacks == [("tiny", "pool", "OBJECT_STORE_UNAVAILABLE")]


async def test_a_canary_of_a_pool_is_its_own(registry, loaded, publish):
    for name, alias in (("one", "latest"), ("two", "latest@legal"), ("three", "candidate")):
        publish(name, alias)
    registry.set_canary("tiny", "latest@legal", Canary(3, 999))
    store = RouterStore(registry)
    await store.preload([loaded])
    ids = [f"request-{number}" for number in range(20)]
    got = {pool: set() for pool in POOLS.values()}
    for pool, versions in got.items():
        for request_id in ids:
            router = await store.select(loaded, RouterChoice(), request_id=request_id, pool=pool)
            versions.add(router.version)
    assert got["shop"] == got["default"] == {1}
    assert 3 in got["legal"] <= {2, 3}


@pytest.fixture(scope="module")
def engine(loaded):
    with Engine(loaded, kv_budget_bytes=64 << 20) as engine:
        yield engine


def of_caller(tmp_path, engine, registry, *, shares_prefixes_by_pool):
    tokens = write_tokens(tmp_path / "tokens", dict.fromkeys(POOLS, (Role.GENERATE,)), POOLS)
    security = ServerSecurity(access=Access(tmp_path / "tokens"))
    metadata = {name: bearer(token) for name, token in tokens.items()}
    state = serving(engine, registry, security=security, shares_prefixes_by_pool=shares_prefixes_by_pool)
    return metadata, state


def test_the_caller_s_token_says_which_router_drafts(tmp_path, engine, registry, publish):
    publish("one", "latest")
    publish("two", "latest@legal")
    metadata, worker = of_caller(tmp_path, engine, registry, shares_prefixes_by_pool=True)
    with worker as state, grpc.insecure_channel(state.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = request_of(4, depth=EXACT)
        versions = {name: answer(stub, request, metadata=metadata[name])[0].router_version for name in POOLS}
        assert versions == {"ann": 2, "bob": 1, "eve": 1}


def test_a_request_names_its_pool_where_its_caller_may(tmp_path, engine, registry, publish):
    publish("one", "latest")
    publish("two", "latest@legal", pool="legal")
    pools = {**POOLS, "gateway": "*"}
    tokens = write_tokens(tmp_path / "tokens", dict.fromkeys(pools, (Role.GENERATE,)), pools)

    def served(pool, **call):
        request = request_of(4, text=f"{security is None}, {LONG}", depth=EXACT, pool=pool)
        started, *_, finished = answer(stub, request, **call)
        return started.router_version, finished.usage.num_cached_tokens > 40

    for security in (None, ServerSecurity(access=Access(tmp_path / "tokens"))):
        worker = serving(engine, registry, security=security, shares_prefixes_by_pool=True)
        with worker as state, grpc.insecure_channel(state.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = {} if security is None else {"metadata": bearer(tokens["gateway"])}
            # The first of a pool finds nothing that another pool has left, and gets its own pool's router.
            order = ("legal", "shop", "legal", "", "default")
            found = [served(pool, **call) for pool in order]
            assert found == [(2, False), (1, False), (2, True), (1, False), (1, True)]
            if security is not None:
                assert served("legal", metadata=bearer(tokens["ann"])) == (2, True)


@pytest.mark.parametrize("by_pool", [True, False])
def test_cached_prefixes_are_shared_within_a_pool_or_by_all(tmp_path, engine, registry, by_pool):
    metadata, worker = of_caller(tmp_path, engine, registry, shares_prefixes_by_pool=by_pool)
    text = f"{LONG}, {by_pool}"

    def num_cached(name):
        finished = answer(stub, request_of(4, text=text), metadata=metadata[name])[3]
        return finished.usage.num_cached_tokens

    with worker as state, grpc.insecure_channel(state.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert num_cached("ann") < 40
        assert num_cached("ann") > 40
        assert (num_cached("bob") > 40) == (not by_pool)
        assert (num_cached("eve") > 40) == (not by_pool)
        assert num_cached("bob") > 40
