"""Loads routers before a worker is ready, so that its first requests find them."""

import asyncio
import random
import time
from collections.abc import Sequence

import structlog

from inference_service.routers import RouterStore
from shared.errors import Unavailable
from shared.model.loaded import LoadedModel

# Between two attempts while the registry does not answer, times 0.5 to 1.5.
PAUSE_S = 2.0

log = structlog.get_logger("neap.routers")


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
