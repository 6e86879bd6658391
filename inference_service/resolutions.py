"""Which version an alias names, also while the registry does not answer: then what it said last."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from inference_service.recent import Recent
from shared.blocking import BlockingPool
from shared.errors import Exhausted, Unavailable
from shared.registry.base import AliasTarget

# How long a request whose alias is known waits for a registry that may hang, and how often one that failed is asked again.
PATIENCE_S = 1.0
ASK_AGAIN_S = 2.0
_LOG_INTERVAL_S = 10.0
# Aliases whose last answer is kept.
MAX_KNOWN = 1024

log = structlog.get_logger("neap.routers")

Key = tuple[str, str]


@dataclass(frozen=True)
class Resolution:
    """`seen_at_s`: when the registry said so, on the monotonic clock."""

    target: AliasTarget
    seen_at_s: float


class Resolutions:
    """Asks `resolve(model_id, alias)` for every request, in threads. Belongs to one event loop.

    Questions about aliases that were never resolved have a pool of their own, `new_aliases`: clients can name any number of them,
    and must not hold up the others. Those who ask there and go away take their question back.

    Where that raises Unavailable, or takes longer than `patience_s`, and the alias was resolved before, the last answer holds:
    counted in `num_stale`, told to `on_stale` with the model's id, logged with its age. Every other error is raised, NotFound above
    all. While the registry is known not to answer, requests with a known alias do not wait for it; it is asked again beside them.
    """

    def __init__(
        self,
        resolve: Callable[[str, str], AliasTarget],
        known_aliases: BlockingPool,
        new_aliases: BlockingPool,
        *,
        patience_s: float = PATIENCE_S,
        ask_again_s: float = ASK_AGAIN_S,
        on_stale: Callable[[str], object] = lambda model_id: None,
    ) -> None:
        self.num_stale = 0
        self._on_stale = on_stale
        self._resolve = resolve
        self._patience_s = patience_s
        self._ask_again_s = ask_again_s
        self._known_aliases, self._new_aliases = known_aliases, new_aliases
        self._known: Recent[Key, Resolution] = Recent(MAX_KNOWN)
        self._probe: asyncio.Task[Resolution] | None = None
        self._failed_at_s: float | None = None
        self._logged_at_s = float("-inf")

    def knows(self, model_id: str, alias: str) -> bool:
        """Whether an answer is kept, so that `resolve` waits for `patience_s` at most."""
        return self._known.get((model_id, alias)) is not None

    async def resolve(self, model_id: str, alias: str) -> Resolution:
        """Raises what the registry raises; Unavailable only when nothing was kept for the alias, and Exhausted (TOO_MANY_CALLS)."""
        key = (model_id, alias)
        known = self._known.get(key)
        if known is None:
            return await self._ask(key, self._new_aliases)
        if self._failed_at_s is not None:
            is_due = time.monotonic() - self._failed_at_s >= self._ask_again_s
            if is_due and (self._probe is None or self._probe.done()):
                self._probe = self._ask(key, self._known_aliases)
            return self._stale(key, known)
        try:
            answer = asyncio.shield(self._ask(key, self._known_aliases))
            return await asyncio.wait_for(answer, self._patience_s)
        except (Unavailable, Exhausted, TimeoutError):
            self._failed_at_s = time.monotonic()
            return self._stale(key, known)

    def keep(self, model_id: str, alias: str, resolution: Resolution) -> None:
        """It could be loaded, so it is what to serve when the registry is away."""
        self._known.set((model_id, alias), resolution)

    def _stale(self, key: Key, known: Resolution) -> Resolution:
        self.num_stale += 1
        self._on_stale(key[0])
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= _LOG_INTERVAL_S:
            self._logged_at_s = now_s
            log.warning(
                "the registry does not answer; serving what it said last",
                model_id=key[0],
                alias=key[1],
                version=known.target.published.version,
                age_s=round(now_s - known.seen_at_s, 1),
                num_stale_resolutions=self.num_stale,
            )
        return known

    def _ask(self, key: Key, pool: BlockingPool) -> asyncio.Task[Resolution]:
        task = asyncio.create_task(pool.call(self._answer, *key))
        task.add_done_callback(self._settle)
        return task

    def _answer(self, model_id: str, alias: str) -> Resolution:
        asked_at_s = time.monotonic()
        return Resolution(self._resolve(model_id, alias), asked_at_s)

    def _settle(self, task: asyncio.Task[Resolution]) -> None:
        if task.cancelled():
            return
        # Any other error is an answer, too. Asking for it also marks it as seen when every caller has gone.
        error = task.exception()
        if isinstance(error, Exhausted):
            return  # the registry was not asked
        if isinstance(error, Unavailable):
            self._failed_at_s = time.monotonic()
        elif self._failed_at_s is not None:
            log.info("the registry answers again", num_stale_resolutions=self.num_stale)
            self._failed_at_s = None
