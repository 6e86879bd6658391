"""From what a request says about its router to a ladder in memory."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from inference_service.resolutions import Resolution, Resolutions
from inference_service.router_loader import (
    LoadedRouter,
    Prepare,
    ReadBlob,
    RouterLoader,
    Unpack,
)
from shared.errors import InvalidInput, NeapError, NotFound, PreconditionFailed
from shared.ladder.artefact import unpack_ladder
from shared.model.load import LoadedModel
from shared.registry.base import Registry
from shared.registry.split import takes_canary

__all__ = ["DEFAULT_ALIAS", "LoadedRouter", "RouterChoice", "RouterStore"]

DEFAULT_ALIAS = "latest"
# What a fallback was wanted for.
ALIAS, CANARY = "alias", "canary"


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


class RouterStore:
    """Chooses among published ladders and keeps the `capacity` last used. Belongs to one event loop; blocking work runs in threads.

    An alias that has moved serves what it served until the new version is ready beside it; a canary's share gets the alias' own
    version until the candidate is. `on_fallback` is called for each such request with the model's id, "alias" or "canary", and
    why: LOADING, or the reason the version could not be loaded. `on_stale` is called with the model's id for each request
    served by what an alias named before the registry went away.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        capacity: int = 4,
        default_alias: str = DEFAULT_ALIAS,
        unpack: Unpack = unpack_ladder,
        read_blob: ReadBlob | None = None,
        on_stale: Callable[[str], object] = lambda model_id: None,
        on_fallback: Callable[[str, str, str], object] = lambda model_id, wanted, reason: None,
    ) -> None:
        self._loader = RouterLoader(registry, capacity=capacity, unpack=unpack, read_blob=read_blob)
        self._resolutions = Resolutions(registry.target, on_stale=on_stale)
        self._registry = registry
        self._default_alias = default_alias
        self._on_fallback = on_fallback
        # What each alias served last.
        self._serving: dict[tuple[str, str], LoadedRouter] = {}

    def prepare_with(self, model_id: str, prepare: Prepare) -> None:
        """See `RouterLoader.prepare_with`."""
        self._loader.prepare_with(model_id, prepare)

    def loaded(self, model_id: str) -> list[LoadedRouter]:
        """Those of one model, by version. From any thread."""
        return self._loader.loaded(model_id)

    async def select(
        self, loaded: LoadedModel, choice: RouterChoice, *, request_id: str = ""
    ) -> LoadedRouter:
        """The chosen router, loaded, its digests checked. `request_id` decides whether it is the alias' canary.

        A version is immutable, so one that is loaded needs no look at the registry. An alias is resolved for every request;
        while the registry or its store is away, the version it named last serves on (`on_stale`).
        Raises NotFound (version or alias), PreconditionFailed (ROUTER_REQUIRED: no choice was made and none is published),
        RouterMismatch, Corrupt, Unavailable (what was asked for is not loaded and cannot be).
        """
        if choice.version is not None:
            return await self._loader.get(loaded, choice.version)
        alias = choice.alias or self._default_alias
        resolution = await self._resolve(loaded.model_id, choice.alias)
        canary = resolution.target.canary
        if canary is not None and takes_canary(request_id, loaded.model_id, alias, canary):
            candidate = self._loader.get_soon(loaded, canary.version)
            if isinstance(candidate, LoadedRouter):
                return candidate
            self._on_fallback(loaded.model_id, CANARY, candidate)
        return await self._own(loaded, alias, resolution)

    async def refresh(self, loaded: LoadedModel) -> None:
        """Begin to load what the aliases that were asked for name now, canaries included. Never raises NeapError: the next
        request that needs the registry says what is wrong with it."""
        for model_id, alias in list(self._serving):
            if model_id != loaded.model_id:
                continue
            try:
                # Not as a request would: nobody is served by an old answer here.
                target = await asyncio.to_thread(self._registry.target, model_id, alias)
            except NeapError:
                continue
            published, canary = target.published, target.canary
            self._loader.get_soon(loaded, published.version, published)
            if canary is not None:
                self._loader.get_soon(loaded, canary.version)

    async def _own(self, loaded: LoadedModel, alias: str, resolution: Resolution) -> LoadedRouter:
        """The alias' own version, or what it served before while that is not ready."""
        published = resolution.target.published
        serving = self._serving.get((loaded.model_id, alias))
        if serving is None:
            router = await self._loader.get(loaded, published.version, published)
        elif serving.version == published.version:
            self._loader.find(loaded.model_id, serving.version)  # counts as a use
            router = serving
        else:
            found = self._loader.get_soon(loaded, published.version, published)
            if not isinstance(found, LoadedRouter):
                self._on_fallback(loaded.model_id, ALIAS, found)
                return serving
            router = found
        self._serving[loaded.model_id, alias] = router
        self._resolutions.keep(loaded.model_id, alias, resolution)
        return router

    async def _resolve(self, model_id: str, alias: str | None) -> Resolution:
        try:
            return await self._resolutions.resolve(model_id, alias or self._default_alias)
        except NotFound as error:
            if alias is not None:
                raise
            raise PreconditionFailed(
                f"no router is published for model {model_id!r}: calibrate one with "
                f"`neap calibrate --model {model_id}`, or ask for the depth policy full",
                reason="ROUTER_REQUIRED",
                metadata={"model_id": model_id, "alias": self._default_alias},
            ) from error
