"""From what a request says about its router to a ladder in memory."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from inference_service.resolutions import Resolution, Resolutions
from shared.errors import InvalidInput, NotFound, PreconditionFailed, Unavailable
from shared.ladder.artefact import unpack_ladder
from shared.ladder.ladder import Ladder
from shared.model.load import LoadedModel
from shared.registry.base import PublishedVersion, Registry

DEFAULT_ALIAS = "latest"

log = structlog.get_logger("neap.routers")


@dataclass(frozen=True)
class RouterChoice:
    """A version, an alias, or neither: the default alias."""

    version: int | None = None
    alias: str | None = None

    def __post_init__(self) -> None:
        if self.version is not None and self.version < 1:
            raise InvalidInput(f"router version is {self.version}; versions start at 1")
        if self.alias == "":
            raise InvalidInput("the router alias is empty")


@dataclass(frozen=True)
class LoadedRouter:
    """A published ladder in memory, checked against its model."""

    model_id: str
    version: int
    digest: str
    rungs: tuple[str, ...]
    ladder: Ladder


class RouterStore:
    """Loads published ladders once and keeps the `capacity` last used. Belongs to one event loop; blocking work runs in threads.

    `on_stale` is called with the model's id for each request counted in `num_stale_resolutions`. An evicted ladder lives on in the requests that use it. Failures are not remembered: a repaired registry works at once.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        capacity: int = 4,
        unpack: Callable[[Mapping[str, Any], Mapping[str, bytes]], Ladder] = unpack_ladder,
        on_stale: Callable[[str], object] = lambda model_id: None,
    ) -> None:
        self._registry = registry
        self._resolutions = Resolutions(registry.resolve, on_stale=on_stale)
        self._capacity = capacity
        self._unpack = unpack
        self._loaded: OrderedDict[tuple[str, int], LoadedRouter] = OrderedDict()
        self._loading: dict[tuple[str, int], asyncio.Task[LoadedRouter]] = {}

    def loaded(self, model_id: str) -> list[LoadedRouter]:
        """Those of one model, by version."""
        mine = [router for router in self._loaded.values() if router.model_id == model_id]
        return sorted(mine, key=lambda router: router.version)

    async def select(self, loaded: LoadedModel, choice: RouterChoice) -> LoadedRouter:
        """The chosen router, loaded, its digests checked.

        A version is immutable, so one that is loaded needs no look at the registry. An alias is resolved for every request;
        while the registry or its store is away, the version it named last serves on (`num_stale_resolutions`).
        Raises NotFound (version or alias), PreconditionFailed (ROUTER_REQUIRED: no choice was made and none is published),
        RouterMismatch, Corrupt, Unavailable (what was asked for is not loaded and cannot be).
        """
        model_id = loaded.model_id
        if choice.version is not None:
            return await self._get(loaded, choice.version, None)
        alias = choice.alias or DEFAULT_ALIAS
        resolution = await self._resolve(model_id, choice.alias)
        try:
            router = await self._get(loaded, resolution.published.version, resolution.published)
        except Unavailable:
            # The alias names a version that cannot be fetched now: what it named before still serves.
            last = self._resolutions.last(model_id, alias)
            key = (model_id, 0 if last is None else last.version)
            if key not in self._loaded:
                raise
            return self._loaded[key]
        self._resolutions.keep(model_id, alias, resolution)
        return router

    @property
    def num_stale_resolutions(self) -> int:
        """Requests served by what an alias named before the registry went away."""
        return self._resolutions.num_stale

    async def _resolve(self, model_id: str, alias: str | None) -> Resolution:
        try:
            return await self._resolutions.resolve(model_id, alias or DEFAULT_ALIAS)
        except NotFound as error:
            if alias is not None:
                raise
            raise PreconditionFailed(
                f"no router is published for model {model_id!r}: calibrate one with "
                f"`neap calibrate --model {model_id}`, or ask for the depth policy full",
                reason="ROUTER_REQUIRED",
                metadata={"model_id": model_id, "alias": DEFAULT_ALIAS},
            ) from error

    async def _get(
        self, loaded: LoadedModel, version: int, published: PublishedVersion | None
    ) -> LoadedRouter:
        key = (loaded.model_id, version)
        if key in self._loaded:
            self._loaded.move_to_end(key)
            return self._loaded[key]
        task = self._loading.get(key)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(self._load, loaded, version, published))
            self._loading[key] = task
            task.add_done_callback(lambda done: self._settle(key, done))
        # One caller that goes away must not end the load for the others.
        return await asyncio.shield(task)

    def _load(
        self, loaded: LoadedModel, version: int, published: PublishedVersion | None
    ) -> LoadedRouter:
        published = published or self._registry.get(loaded.model_id, version)
        blobs = {
            name: self._registry.read_blob(published, name) for name in published.manifest["blobs"]
        }
        ladder = self._unpack(published.manifest, blobs)
        ladder.check_model(loaded)
        log.info("router loaded", model_id=loaded.model_id, version=version)
        return LoadedRouter(
            model_id=loaded.model_id,
            version=version,
            digest=published.manifest_digest,
            rungs=ladder.rung_names,
            ladder=ladder,
        )

    def _settle(self, key: tuple[str, int], task: asyncio.Task[LoadedRouter]) -> None:
        del self._loading[key]
        # Asking for the exception also marks it as seen when every caller has gone.
        if task.cancelled() or task.exception() is not None:
            return
        self._loaded[key] = task.result()
        while len(self._loaded) > self._capacity:
            self._loaded.popitem(last=False)
