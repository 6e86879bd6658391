"""Work of the engine's thread that belongs to no request, in slices between the steps of those that do."""

import logging
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future

from shared.errors import NeapError

logger = logging.getLogger(__name__)

# While requests run, a slice follows every so many steps: it is about as long as a step, and delays one token of each stream.
STEPS_PER_SLICE = 4

Slices = Generator[None, None, None]


class Chores:
    """First come, first done. `add` and `close` under the engine's lock; the rest is the engine's thread's."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Slices, Future[None]]] = deque()
        self._steps = 0

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def add(self, slices: Slices) -> "Future[None]":
        """`slices` yields where a step may come between. The future ends when it has, or fails as it does; the engine's thread may
        cancel it, and what is left of the work with it."""
        future: Future[None] = Future()
        self._waiting.append((slices, future))
        return future

    def after_step(self) -> None:
        """A slice, if it is time for one."""
        self._steps += 1
        if self._steps % STEPS_PER_SLICE == 0:
            self.slice()

    def slice(self) -> None:
        """The next slice of the first chore. What it raises goes to whoever waits for it."""
        if not self._waiting:
            return
        slices, future = self._waiting[0]
        if future.cancelled():
            self._waiting.popleft()
            return
        try:
            next(slices)
        except StopIteration:
            future.set_result(None)
        except Exception as error:
            logger.warning("work between steps failed", exc_info=True)
            future.set_exception(error.with_traceback(None))
        else:
            return
        self._waiting.popleft()

    def close(self, error: NeapError) -> None:
        """Whoever waits is told `error`."""
        while self._waiting:
            future = self._waiting.popleft()[1]
            if not future.cancelled():
                future.set_exception(error)
