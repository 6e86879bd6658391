"""Chooses the loaded ladder for a request's router selector."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import structlog

from inference_service.lru_cache import LruCache
from inference_service.pools import Pools
from inference_service.resolutions import MAX_KNOWN, Resolution, Resolutions, takes_canary
from inference_service.router_loader import Binder, LoadedRouter, ReadBlob, RouterLoader, Unpack
from shared.errors import Exhausted, InvalidInput, NeapError, NotFound, PermissionDenied, Unavailable
from shared.exchange.signatures import Verifier
from shared.ladder.artefact import unpack_ladder
from shared.model.loaded import LoadedModel
from shared.pool_names import DEFAULT_POOL
from shared.registry.base import PublishedVersion
from shared.registry.names import alias_in_pool, check_alias, pool_of_alias
from shared.registry.registry import Registry

__all__ = ["DEFAULT_ALIAS", "LoadedRouter", "RouterChoice", "RouterStore"]

DEFAULT_ALIAS = "latest"
# The kinds of fallbacks that `on_fallback` reports.
ALIAS, CANARY, DEFAULT, POOL = "alias", "canary", "default", "pool"
# The reason of the last: a large model's fingerprint is not known yet, which says what routers it can have.
NOT_IDENTIFIED = "NOT_IDENTIFIED"
# Requests that may wait for the registry at once, because their alias or version is not known here.
MAX_WAITING = 32
# Other models among which routers of the same weights are looked for.
MAX_NAMES = 64

log = structlog.get_logger("neap.routers")


@dataclass(frozen=True)
class RouterChoice:
    """A version, an alias, or neither: the default alias."""

    version: int | None = None
    alias: str | None = None

    def __post_init__(self) -> None:
        if self.version is not None and self.version < 1:
            raise InvalidInput(f"router version is {self.version}; versions start at 1")
        if self.alias is not None:
            # Here, so that it needs no place among the requests that wait for the registry.
            check_alias(self.alias)


class RouterStore:
    """Chooses among published ladders. Belongs to one event loop. Blocking work runs in `pools`.

    They are loaded as long as their models' binders have them bound (`RouterLoader`), which drop the version that the
    default alias serves last. At most `max_waiting` requests may wait at once for an alias that was never resolved or
    a version that is not loaded; more are refused with Exhausted (ROUTER_LOOKUPS_BUSY).

    After an alias has moved, it serves its previous version until the new one is loaded. A canary's requests get the
    alias' own version until the canary is loaded. For each such request `on_fallback` is called with the model's id,
    "alias" or "canary", and the reason: LOADING, or why the version could not be loaded. It is also called, with
    "default", for each request without a choice for which there is no router, or none yet (NOT_IDENTIFIED), and, with
    "pool", for each one that gets the model's alias because the registry does not say whether its pool has one.
    `on_stale` is called with the model's id for each request that is served by an alias' last known version while the
    registry does not answer.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        default_alias: str = DEFAULT_ALIAS,
        unpack: Unpack = unpack_ladder,
        read_blob: ReadBlob | None = None,
        pools: Pools | None = None,
        max_waiting: int = MAX_WAITING,
        verifier: Verifier | None = None,
        on_stale: Callable[[str], object] = lambda model_id: None,
        on_fallback: Callable[[str, str, str], object] = lambda model_id, asked, reason: None,
    ) -> None:
        self._pools = pools or Pools()
        self._loader = RouterLoader(
            registry,
            unpack=unpack,
            read_blob=read_blob,
            pools=self._pools,
            verifier=verifier,
        )
        self._resolutions = Resolutions(
            registry.target, self._pools.known_aliases, self._pools.new_aliases, on_stale=on_stale
        )
        self._registry = registry
        self._default_alias = default_alias
        self._on_fallback = on_fallback
        self._num_waiting, self._max_waiting = 0, max_waiting
        self._suspended: dict[str, frozenset[str]] = {}
        # The version that each alias served last. The loader may have evicted it.
        self._serving: LruCache[tuple[str, str], int] = LruCache(MAX_KNOWN)

    def bind_with(self, model_id: str, binder: Binder) -> None:
        """See `RouterLoader.bind_with`."""
        self._loader.bind_with(model_id, binder)

    def loaded(self, model_id: str) -> list[LoadedRouter]:
        """The loaded routers of one model, by version. Any thread may call it."""
        return self._loader.loaded(model_id)

    def suspend(self, model_id: str, aliases: frozenset[str]) -> None:
        """From now on no router drafts for requests that name one of these aliases, by default or by choice, and for
        all others of the model one does again. Any thread may call it."""
        self._suspended[model_id] = aliases

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the registry now; at most `max_waiting`."""
        return self._num_waiting

    async def select(
        self, loaded: LoadedModel, choice: RouterChoice, *, request_id: str = "", pool: str = DEFAULT_POOL
    ) -> LoadedRouter | None:
        """The chosen router, loaded, with its digests checked. `request_id` decides whether it is the alias' canary.
        None if no choice was made and the default alias names no version or the model is not identified yet, and if the
        alias' router is suspended. For callers of a `pool` the alias is ALIAS@POOL where there is one, and no other
        pool's.

        A version is immutable, so a loaded one is used without asking the registry. An alias is resolved for every
        request. While the registry or its store does not answer, the alias' last known version is used (`on_stale`).
        Raises NotFound (version or alias), RouterMismatch, Corrupt, Unavailable (what was asked for is not loaded and
        cannot be), Exhausted (ROUTER_LOOKUPS_BUSY), PermissionDenied (POOL_NOT_ALLOWED).
        """
        if choice.version is not None:
            router = await self._get(loaded, choice.version)
            _check_pool(f"version {choice.version}", router.pool, pool)
            return router
        if choice.alias is None and not loaded.identity.is_known:
            self._on_fallback(loaded.model_id, DEFAULT, NOT_IDENTIFIED)
            return None
        alias = choice.alias or self._default_alias
        _check_pool(f"alias {alias!r}", pool_of_alias(alias) or "", pool)
        own_alias = alias_in_pool(alias, pool)
        own = None
        if own_alias is not None:
            own = await self._of_pool(loaded.model_id, own_alias, is_chosen=choice.alias is not None)
        try:
            resolution = own or await self._resolve(loaded.model_id, alias)
        except NotFound as error:
            if choice.alias is not None:
                raise
            self._resolutions.keep_absence(loaded.model_id, alias, error)
            self._on_fallback(loaded.model_id, DEFAULT, error.reason)
            return None
        if own is not None and own_alias is not None:
            alias = own_alias
        if alias in self._suspended.get(loaded.model_id, ()):
            self._on_fallback(loaded.model_id, ALIAS, "SUSPENDED")
            return None
        canary = resolution.target.canary
        if canary is not None and takes_canary(request_id, loaded.model_id, alias, canary):
            candidate = self._loader.get_soon(loaded, canary.version)
            if isinstance(candidate, LoadedRouter):
                return replace(candidate, alias=alias)
            self._on_fallback(loaded.model_id, CANARY, candidate)
        return replace(await self._own(loaded, alias, resolution), alias=alias)

    async def preload(self, served: Sequence[LoadedModel], aliases: Sequence[str] | None = None) -> None:
        """Loads what requests will ask for first: the default alias of every model, then `aliases`, canaries included.
        None: all aliases of the models, newest versions first. Stops where others would be dropped for the next one.

        What cannot be loaded is logged, and requests for it get the error. Raises Unavailable if the registry does not
        answer; what was loaded until then stays loaded.
        """
        for loaded in served:
            await self._preload_or_log(loaded, self._default_alias)
            if not self.loaded(loaded.model_id):
                await self._log_other_names(loaded)
        for loaded in served:
            for alias in await self._all_aliases(loaded.model_id) if aliases is None else aliases:
                if alias != self._default_alias:
                    await self._preload_or_log(loaded, alias)

    async def _all_aliases(self, model_id: str) -> list[str]:
        versions: Mapping[str, int] = {}
        with _logged(model_id, alias="all"):
            versions = await self._pools.fetches.call(self._registry.aliases, model_id)
        return sorted(versions, key=lambda alias: versions[alias], reverse=True)

    async def _preload_or_log(self, loaded: LoadedModel, alias: str) -> None:
        with _logged(loaded.model_id, alias):
            await self._preload(loaded, alias)

    async def _log_other_names(self, loaded: LoadedModel) -> None:
        """Routers belong to weights, but are found by the model's id, which may be another where they are published."""
        names: list[str] = []
        with _logged(loaded.model_id, alias="all"):
            names = await self._pools.fetches.call(_names_of, self._registry, loaded.fingerprint)
        # Under its own it may be damaged, which has been said.
        if names := [name for name in names if name != loaded.model_id]:
            log.warning(
                "routers of the same weights are published under other ids: serve the model as one of them, or export "
                "a router and import it under this one (--model)",
                model_id=loaded.model_id,
                published_as=names,
            )

    async def _preload(self, loaded: LoadedModel, alias: str) -> None:
        resolution = await self._resolutions.resolve(loaded.model_id, alias)
        target = resolution.target
        canary = () if target.canary is None else (target.canary.version,)
        missing = {target.published.version, *canary}
        missing -= {router.version for router in self.loaded(loaded.model_id)}
        binder = self._loader.binder(loaded.model_id)
        if binder is None or binder.ladders.has_room_for(len(missing)) or alias == self._default_alias:
            await self._own(loaded, alias, resolution)
            for version in canary:
                await self._get(loaded, version)

    async def refresh(self, loaded: LoadedModel) -> None:
        """Begins to load the versions that the aliases in use name now, canaries included, and loads the first version
        of the default alias. Never raises NeapError: the next request that needs the registry reports its error."""
        self._loader.forget_dropped()
        if self._serving.peek((loaded.model_id, self._default_alias)) is None:
            with suppress(NeapError):
                await self._preload(loaded, self._default_alias)
        mine = [(key, version) for key, version in self._serving.newest_first() if key[0] == loaded.model_id]
        for (model_id, alias), version in mine:
            # What was dropped is loaded when a request needs it: now it would only have others dropped.
            if self._loader.find(model_id, version) is None:
                continue
            try:
                # Not through `Resolutions`: a kept answer is of no use here.
                target = await self._pools.fetches.call(self._registry.target, model_id, alias)
            except NeapError:
                continue
            published, canary = target.published, target.canary
            if published.version != version:
                self._loader.get_soon(loaded, published.version, published)
            if canary is not None:
                self._loader.get_soon(loaded, canary.version)

    async def _own(self, loaded: LoadedModel, alias: str, resolution: Resolution) -> LoadedRouter:
        """The alias' own version, or the one that it served before while that is not loaded."""
        published = resolution.target.published
        key = (loaded.model_id, alias)
        served = self._serving.get(key)
        serving = None if served is None else self._loader.find(loaded.model_id, served)
        if serving is None:
            router = await self._get(loaded, published.version, published)
        elif serving.version == published.version:
            router = serving
        else:
            outcome = self._loader.get_soon(loaded, published.version, published)
            if not isinstance(outcome, LoadedRouter):
                self._on_fallback(loaded.model_id, ALIAS, outcome)
                return serving
            router = outcome
        self._serving.set(key, router.version)
        binder = self._loader.binder(loaded.model_id)
        if binder is not None and alias == self._default_alias:
            binder.ladders.kept = router.ladder
        self._resolutions.keep(loaded.model_id, alias, resolution)
        return router

    async def _get(self, loaded: LoadedModel, version: int, published: PublishedVersion | None = None) -> LoadedRouter:
        router = self._loader.find(loaded.model_id, version)
        if router is not None:
            return router
        with self._count_waiting():
            return await self._loader.get(loaded, version, published)

    @contextmanager
    def _count_waiting(self) -> Iterator[None]:
        if self._num_waiting >= self._max_waiting:
            raise Exhausted(
                f"{self._num_waiting} requests wait for the registry already; this is the limit",
                reason="ROUTER_LOOKUPS_BUSY",
                retry_after_s=1.0,
            )
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    async def _of_pool(self, model_id: str, alias: str, *, is_chosen: bool) -> Resolution | None:
        """What an alias of a pool names, None if there is none, or if the registry does not say.
        `is_chosen`: a client has chosen its first part."""
        try:
            return await self._resolve(model_id, alias)
        except NotFound as error:
            if not is_chosen:
                self._resolutions.keep_absence(model_id, alias, error)
        except (Exhausted, Unavailable) as error:
            self._on_fallback(model_id, POOL, error.reason)
        return None

    async def _resolve(self, model_id: str, alias: str) -> Resolution:
        if self._resolutions.knows(model_id, alias):
            return await self._resolutions.resolve(model_id, alias)
        with self._count_waiting():
            return await self._resolutions.resolve(model_id, alias)


def _names_of(registry: Registry, fingerprint: str) -> list[str]:
    """The models whose newest router is of these weights. Looks at `MAX_NAMES` at most. Blocks."""
    newest = {name: registry.list_versions(name, limit=1) for name in registry.models()[:MAX_NAMES]}
    return [name for name, versions in newest.items() if any(_fingerprint_of(v) == fingerprint for v in versions)]


def _fingerprint_of(version: PublishedVersion) -> object:
    model = version.manifest.get("model")
    return model.get("fingerprint") if isinstance(model, dict) else None


@contextmanager
def _logged(model_id: str, alias: str) -> Iterator[None]:
    """Logs errors of loading routers in advance, so that they do not keep the worker from serving.
    Raises Unavailable."""
    try:
        yield
    except Unavailable:
        raise
    except NotFound as error:
        log.warning(
            "no router is published: until then exact drafts by prompt look-up alone",
            model_id=model_id,
            alias=alias,
            reason=error.reason,
        )
    except Exception as error:
        log.warning(
            "no router was loaded in advance",
            model_id=model_id,
            alias=alias,
            reason=error.reason if isinstance(error, NeapError) else "INTERNAL",
            exc_info=not isinstance(error, NeapError),
        )


# Between two attempts while the registry does not answer, times 0.5 to 1.5.
PAUSE_S = 2.0


async def preload_routers(
    routers: RouterStore,
    served: Sequence[LoadedModel],
    aliases: Sequence[str] | None,
    *,
    timeout_s: float | None,
    pause_s: float = PAUSE_S,
) -> None:
    """See `RouterStore.preload`. While the registry does not answer, it is asked again for up to `timeout_s` seconds,
    None: without a limit. The time for loading itself is not limited."""
    began_s, is_first = time.monotonic(), True
    while True:
        try:
            await routers.preload(served, aliases)
        except Unavailable as error:
            if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
                log.warning("the worker serves without routers", reason=error.reason)
                return
            if is_first:
                log.warning("the worker waits for the registry", reason=error.reason)
            is_first = False
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
        else:
            return


def _check_pool(what: str, owner: str, pool: str) -> None:
    """Raises PermissionDenied (POOL_NOT_ALLOWED) if `what` belongs to a pool that is not the caller's."""
    if owner not in ("", pool):
        raise PermissionDenied(f"{what} belongs to another pool than this caller", reason="POOL_NOT_ALLOWED")
