"""Loads published ladders: fetches, checks and prepares each one once, and keeps the most recently used."""

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from inference_service.lru_cache import LruCache
from inference_service.pools import Pools
from shared.errors import Corrupt, NeapError, NotFound, Unavailable
from shared.exchange.signatures import Verifier
from shared.ladder.artefact import unpack_ladder
from shared.ladder.blob_names import MAX_BLOB_BYTES, served_blobs
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

Unpack = Callable[[Mapping[str, Any], Mapping[str, bytes]], Ladder]
ReadBlob = Callable[[PublishedVersion, str], bytes]
Prepare = Callable[[Ladder], None]

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
    """Keeps the `capacity` most recently used routers. Belongs to one event loop. Blocking work runs in `pools`.

    Routers for which `is_kept(model_id, version)` is true are evicted last. `read_blob` must check digests. A router
    counts as loaded once its model's `prepare` has returned, if there is one. With a `verifier` only signed ones are
    loaded. An evicted ladder stays alive while requests use it.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        capacity: int,
        unpack: Unpack = unpack_ladder,
        read_blob: ReadBlob | None = None,
        pools: Pools | None = None,
        is_kept: Callable[[str, int], bool] = lambda model_id, version: False,
        verifier: Verifier | None = None,
    ) -> None:
        self._registry = registry
        self._capacity = capacity
        self._pools = pools or Pools()
        self._is_kept = is_kept
        self._verifier = verifier
        self._logged_at_s: dict[str, float] = {}
        self._num_unlogged = 0
        self._unpack = unpack
        self._read_blob = read_blob or registry.read_blob
        self._prepare: dict[str, Prepare] = {}
        self._loaded: OrderedDict[tuple[str, int], LoadedRouter] = OrderedDict()
        self._loading: dict[tuple[str, int], asyncio.Task[LoadedRouter]] = {}
        self._failures: LruCache[tuple[str, int], _Failure] = LruCache(MAX_FAILURES)

    def prepare_with(self, model_id: str, prepare: Prepare) -> None:
        """Calls `prepare(ladder)`, in a thread, before a router of this model counts as loaded.
        It may raise NeapError."""
        self._prepare[model_id] = prepare

    def loaded(self, model_id: str) -> list[LoadedRouter]:
        """The loaded routers of one model, by version. Any thread may call it."""
        mine = [router for router in list(self._loaded.values()) if router.model_id == model_id]
        return sorted(mine, key=lambda router: router.version)

    @property
    def num_loaded(self) -> int:
        """The loaded routers of all models."""
        return len(self._loaded)

    def find(self, model_id: str, version: int) -> LoadedRouter | None:
        """The router if it is loaded, else None. Counts as a use."""
        router = self._loaded.get((model_id, version))
        if router is not None:
            self._loaded.move_to_end((model_id, version))
        return router

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
        fetched, blobs = await self._pools.fetches.call(self._fetch, loaded.model_id, version, published)
        return await self._pools.preparations.call(self._make, loaded, version, fetched, blobs)

    def _fetch(
        self, model_id: str, version: int, published: PublishedVersion | None
    ) -> tuple[PublishedVersion, dict[str, bytes]]:
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
        return published, {name: self._read_blob(published, name) for name in names}

    def _make(
        self, loaded: LoadedModel, version: int, published: PublishedVersion, blobs: Mapping[str, bytes]
    ) -> LoadedRouter:
        ladder = self._unpack(published.manifest, blobs)
        ladder.check_model(loaded)
        prepare = self._prepare.get(loaded.model_id)
        if prepare is not None:
            prepare(ladder)
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
        while len(self._loaded) > self._capacity:
            del self._loaded[self._least_needed()]

    def _least_needed(self) -> tuple[str, int]:
        """The least recently used router that is not to be kept.
        Never the newest one, which a request is about to use."""
        *older, newest = self._loaded
        return next((key for key in older if not self._is_kept(*key)), older[0] if older else newest)

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
