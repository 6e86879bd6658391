"""Resolves aliases to versions. While the registry does not answer, the last answer is used."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from inference_service.lru_cache import LruCache
from shared.blocking import BlockingPool
from shared.errors import Corrupt, Exhausted, NotFound, PreconditionFailed, Unavailable
from shared.registry.base import AliasTarget, Canary

_SCALE = 1000


def takes_canary(request_id: str, model_id: str, alias: str, canary: Canary) -> bool:
    """Return whether this request belongs to the canary's share.

    A keyed hash (BLAKE2b, RFC 7693) maps the request to one of 1000 places, and the canary has the first
    `share_per_mille` places. A growing share therefore keeps its requests. The key consists of model, alias and canary
    version, so another rollout selects other requests, independently of this one.
    """
    scope = f"{model_id}\0{alias}\0{canary.version}".encode()
    # A BLAKE2b key has at most 64 bytes, and model ids may be longer.
    key = hashlib.blake2b(scope, digest_size=32).digest()
    digest = hashlib.blake2b(request_id.encode(), key=key, digest_size=8).digest()
    # 2**64 places folded onto 1000: the error is below 1e-16.
    return int.from_bytes(digest) % _SCALE < canary.share_per_mille


# How long a request with a known alias waits for the registry, and how long after a failure the registry is asked
# again.
PATIENCE_S = 1.0
ASK_AGAIN_S = 2.0
_LOG_INTERVAL_S = 10.0
# The errors by which a registry answers.
_ANSWERS = (NotFound, PreconditionFailed, Corrupt)
# Aliases whose last answer is kept.
MAX_KNOWN = 1024

log = structlog.get_logger("neap.routers")

Key = tuple[str, str]


@dataclass(frozen=True)
class Resolution:
    """`seen_at_s`: when the registry was asked, in `time.monotonic()` seconds."""

    target: AliasTarget
    seen_at_s: float


class Resolutions:
    """Calls `resolve(model_id, alias)` for every request, in a thread. Belongs to one event loop.

    Aliases that were never resolved have a pool of their own, `new_aliases`: clients can name any number of them, and
    these must not delay other requests. A cancelled call withdraws its query from that pool.

    If `resolve` raises Unavailable, or takes longer than `patience_s`, and the alias was resolved before, the last
    answer is used. It is counted in `num_stale`, logged with its age, and `on_stale` is called with the model's id.
    Every other error is raised, in particular NotFound, which `keep_absence` keeps as an answer. After such a failure
    requests with a known alias do not wait for the registry. It is asked again in the background every `ask_again_s`.
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
        self._patience_s, self._ask_again_s = patience_s, ask_again_s
        self._known_aliases, self._new_aliases = known_aliases, new_aliases
        self._known: LruCache[Key, Resolution | NotFound] = LruCache(MAX_KNOWN)
        self._refresh: asyncio.Task[Resolution] | None = None
        self._failed_at_s: float | None = None
        self._logged_at_s = float("-inf")

    def knows(self, model_id: str, alias: str) -> bool:
        """Whether an earlier answer is kept. Then `resolve` waits for `patience_s` at most."""
        return self._known.get((model_id, alias)) is not None

    async def resolve(self, model_id: str, alias: str) -> Resolution:
        """Raises the registry's errors, Unavailable only if no answer is kept for the alias, and Exhausted
        (TOO_MANY_CALLS)."""
        key = (model_id, alias)
        known = self._known.get(key)
        if known is None:
            return await self._ask(key, self._new_aliases)
        if self._failed_at_s is not None:
            is_due = time.monotonic() - self._failed_at_s >= self._ask_again_s
            if is_due and (self._refresh is None or self._refresh.done()):
                self._refresh = self._ask(key, self._known_aliases)
            return self._stale(key, known)
        try:
            answer = asyncio.shield(self._ask(key, self._known_aliases))
            return await asyncio.wait_for(answer, self._patience_s)
        except (Unavailable, Exhausted, TimeoutError):
            self._failed_at_s = time.monotonic()
            return self._stale(key, known)

    def keep(self, model_id: str, alias: str, resolution: Resolution) -> None:
        """Keeps an answer whose version could be loaded, for use while the registry does not answer."""
        self._known.set((model_id, alias), resolution)

    def keep_absence(self, model_id: str, alias: str, error: NotFound) -> None:
        """Keeps the answer that there is no such alias, for the same use. Only for aliases that clients do not
        choose."""
        self._known.set((model_id, alias), error.with_traceback(None))

    def _stale(self, key: Key, known: Resolution | NotFound) -> Resolution:
        self.num_stale += 1
        self._on_stale(key[0])
        now_s = time.monotonic()
        if now_s - self._logged_at_s >= _LOG_INTERVAL_S:
            self._logged_at_s = now_s
            said = {} if isinstance(known, NotFound) else {"age_s": round(now_s - known.seen_at_s, 1)}
            log.warning(
                "the registry does not answer; serving what it said last",
                model_id=key[0],
                alias=key[1],
                version=0 if isinstance(known, NotFound) else known.target.published.version,
                num_stale_resolutions=self.num_stale,
                **said,
            )
        if isinstance(known, NotFound):
            raise known.with_traceback(None)
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
        # Reading the exception also marks it as retrieved if no caller waits for it any more.
        error = task.exception()
        if isinstance(error, Unavailable):
            self._failed_at_s = time.monotonic()
        # Other errors, of an invalid alias or a full pool, arise before the registry is asked.
        elif self._failed_at_s is not None and (error is None or isinstance(error, _ANSWERS)):
            log.info("the registry answers again", num_stale_resolutions=self.num_stale)
            self._failed_at_s = None
