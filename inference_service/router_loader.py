"""Loads published ladders: fetches, checks and binds each one once. They are loaded as long as they are bound."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol
from weakref import WeakValueDictionary

import structlog

from inference_service.lru_cache import LruCache
from inference_service.pools import Pools
from shared.errors import Corrupt, NeapError, NotFound, Unavailable
from shared.exchange.signatures import Verifier
from shared.ladder.artefact import unpack_ladder
from shared.ladder.blob_names import HEADS_BLOB, MAX_BLOB_BYTES, heads_blob, served_blobs
from shared.ladder.exits import Heads
from shared.ladder.ladder import Ladder
from shared.model.loaded import LoadedModel
from shared.registry.base import PublishedVersion
from shared.registry.registry import Registry

# Pause after a background load has failed, times 0.5 to 1.5. A registry that does not answer may do so soon; a broken
# artefact has to be replaced first.
RETRY_AWAY_S = 2.0
RETRY_BROKEN_S = 10.0
# Versions whose failure is remembered. Clients can name any number of versions.
MAX_FAILURES = 128
LOG_INTERVAL_S = 10.0

Unpack = Callable[[Mapping[str, Any], Mapping[str, bytes], Heads | None], Ladder]
ReadBlob = Callable[[PublishedVersion, str], bytes]


class BoundLadders(Protocol):
    """The ladders of a model that are bound. `kept`: this one of all is dropped last."""

    kept: Ladder | None

    def has(self, ladder: Ladder) -> bool: ...

    def has_room_for(self, count: int) -> bool:
        """Whether so many more could be bound without another being dropped."""


class Binder(Protocol):
    """What binds the ladders of a model and drops them again: its engine. Thread-safe."""

    @property
    def ladders(self) -> BoundLadders: ...

    def prepare(self, ladder: Ladder) -> None:
        """Binds it. Blocks. May raise NeapError."""


log = structlog.get_logger("neap.routers")


@dataclass(frozen=True)
class LoadedRouter:
    """A published ladder in memory, checked against its model. `pool`: from whose answers it has learned; empty: from
    no pool's. `alias`: by which it was chosen for a request, if it was."""

    model_id: str
    version: int
    digest: str
    proposers: tuple[str, ...]
    ladder: Ladder
    pool: str = ""
    alias: str = ""


@dataclass(frozen=True)
class _Failure:
    reason: str
    retry_at_s: float


class RouterLoader:
    """Belongs to one event loop. Blocking work runs in `pools`.

    A router is loaded as long as its model's `Binder` has it bound, without one for ever. `read_blob` must check
    digests. With a `verifier` only signed ones are loaded. A ladder that was dropped stays alive while requests use
    it. Routers that have one blob's heads have them in memory once.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        unpack: Unpack = unpack_ladder,
        read_blob: ReadBlob | None = None,
        pools: Pools | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self._registry = registry
        self._pools = pools or Pools()
        self._verifier = verifier
        self._logged_at_s: dict[str, float] = {}
        self._num_unlogged = 0
        self._unpack = unpack
        self._read_blob = read_blob or registry.read_blob
        self._binders: dict[str, Binder] = {}
        self._heads: WeakValueDictionary[str, Heads] = WeakValueDictionary()
        # One of several that come at once and share their heads unpacks these.
        self._unpacking = Lock()
        self._loaded: dict[tuple[str, int], LoadedRouter] = {}
        self._loading: dict[tuple[str, int], asyncio.Task[LoadedRouter]] = {}
        self._failures: LruCache[tuple[str, int], _Failure] = LruCache(MAX_FAILURES)

    def bind_with(self, model_id: str, binder: Binder) -> None:
        """From now on routers of this model are bound, in a thread, before they count as loaded."""
        self._binders[model_id] = binder

    def binder(self, model_id: str) -> Binder | None:
        return self._binders.get(model_id)

    def loaded(self, model_id: str) -> list[LoadedRouter]:
        """The loaded routers of one model, by version. Any thread may call it."""
        mine = [router for router in list(self._loaded.values()) if router.model_id == model_id]
        return sorted(filter(self._is_bound, mine), key=lambda router: router.version)

    def find(self, model_id: str, version: int) -> LoadedRouter | None:
        """The router if it is loaded, else None."""
        router = self._loaded.get((model_id, version))
        return router if router is not None and self._is_bound(router) else None

    def _is_bound(self, router: LoadedRouter) -> bool:
        binder = self._binders.get(router.model_id)
        return binder is None or binder.ladders.has(router.ladder)

    async def get(self, loaded: LoadedModel, version: int, published: PublishedVersion | None = None) -> LoadedRouter:
        """Loads the router unless it is loaded. Tries even if an earlier load failed. Raises NotFound, RouterMismatch,
        Corrupt, Unavailable."""
        router = self.find(loaded.model_id, version)
        if router is not None:
            return router
        # A caller that is cancelled must not cancel the load for the others.
        return await asyncio.shield(self._load(loaded, version, published))

    def get_soon(
        self, loaded: LoadedModel, version: int, published: PublishedVersion | None = None
    ) -> LoadedRouter | str:
        """The router, or why it is not loaded: LOADING (it is loaded in the background now) or the reason of the last
        failure."""
        router = self.find(loaded.model_id, version)
        if router is not None:
            return router
        key = (loaded.model_id, version)
        failure = self._failures.get(key)
        if failure is not None and time.monotonic() < failure.retry_at_s:
            return failure.reason
        self._load(loaded, version, published)
        return failure.reason if failure is not None else "LOADING"

    def _load(
        self, loaded: LoadedModel, version: int, published: PublishedVersion | None
    ) -> asyncio.Task[LoadedRouter]:
        key = (loaded.model_id, version)
        task = self._loading.get(key)
        if task is None:
            task = asyncio.create_task(self._loaded_router(loaded, version, published))
            self._loading[key] = task
            task.add_done_callback(lambda done: self._settle(key, done))
        return task

    async def _loaded_router(
        self, loaded: LoadedModel, version: int, published: PublishedVersion | None
    ) -> LoadedRouter:
        fetched = await self._pools.fetches.call(self._fetch, loaded.model_id, version, published)
        return await self._pools.preparations.call(self._make, loaded, version, *fetched)

    def _fetch(
        self, model_id: str, version: int, published: PublishedVersion | None
    ) -> tuple[PublishedVersion, dict[str, bytes], Heads | None]:
        """With the heads that the version has, if they are in memory."""
        if published is None or published.damage:
            published = self._registry.get(model_id, version)  # raises what the damage is
        entries = published.manifest["blobs"]
        names = served_blobs(entries)
        size_bytes = sum(int(entries[name]["size_bytes"]) for name in names)
        if size_bytes > MAX_BLOB_BYTES:
            raise Corrupt(
                f"version {version} of {model_id!r} has {size_bytes} bytes; at most {MAX_BLOB_BYTES} are loaded",
                reason="ROUTER_TOO_LARGE",
            )
        if self._verifier is not None:
            self._verifier.check_version(published, self._read_blob)
        heads = self._heads.get(_heads_digest(entries))
        needed = [name for name in names if name != HEADS_BLOB or heads is None]
        return published, {name: self._read_blob(published, name) for name in needed}, heads

    def _make(
        self,
        loaded: LoadedModel,
        version: int,
        published: PublishedVersion,
        blobs: Mapping[str, bytes],
        heads: Heads | None,
    ) -> LoadedRouter:
        digest = _heads_digest(published.manifest["blobs"])
        with self._unpacking:
            ladder = self._unpack(published.manifest, blobs, self._heads.get(digest, heads))
            if ladder.heads is not None:
                self._heads[digest] = ladder.heads
        ladder.check_model(loaded)
        binder = self._binders.get(loaded.model_id)
        if binder is not None:
            binder.prepare(ladder)
        log.info("router loaded", model_id=loaded.model_id, version=version)
        return LoadedRouter(
            model_id=loaded.model_id,
            version=version,
            digest=published.manifest_digest,
            proposers=ladder.proposer_names,
            ladder=ladder,
            pool=str(published.manifest.get("pool", "")),
        )

    def _settle(self, key: tuple[str, int], task: asyncio.Task[LoadedRouter]) -> None:
        del self._loading[key]
        # Reading the exception also marks it as retrieved if no caller waits for it any more.
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            reason = error.reason if isinstance(error, NeapError) else "INTERNAL"
            pause_s = RETRY_AWAY_S if isinstance(error, Unavailable) else RETRY_BROKEN_S
            retry_at_s = time.monotonic() + pause_s * random.uniform(0.5, 1.5)
            self._failures.set(key, _Failure(reason, retry_at_s))
            self._log_failure(key, error, reason)
            return
        self._failures.discard(key)
        self._loaded[key] = task.result()
        self.forget_dropped()

    def forget_dropped(self) -> None:
        """Lets go of the routers that are not bound any more."""
        self._loaded = {key: router for key, router in self._loaded.items() if self._is_bound(router)}

    def _log_failure(self, key: tuple[str, int], error: BaseException, reason: str) -> None:
        """Logs one line per reason and interval. A version that does not exist is the caller's error, which the call's
        log line has."""
        if isinstance(error, NotFound):
            return
        now_s = time.monotonic()
        if now_s - self._logged_at_s.get(reason, float("-inf")) < LOG_INTERVAL_S:
            self._num_unlogged += 1
            return
        self._logged_at_s[reason] = now_s
        log.error(
            "a router could not be loaded",
            model_id=key[0],
            version=key[1],
            reason=reason,
            num_not_logged=self._num_unlogged,
        )
        self._num_unlogged = 0


def _heads_digest(entries: Mapping[str, Any]) -> str:
    """The digest of the blob that a router's heads are in. "" for one without it, which cannot be unpacked."""
    entry = entries.get(heads_blob(entries), {})
    return str(entry.get("digest", ""))
