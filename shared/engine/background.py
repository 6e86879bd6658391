"""Background tasks of the engine's thread, such as binding a ladder.
They run in slices between the steps of requests."""

import logging
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future

from shared.errors import NeapError

logger = logging.getLogger(__name__)

# While requests run, one slice runs after every n-th step.
# It takes about as long as a step and delays each stream by one token.
STEPS_PER_SLICE = 4

Slices = Generator[None, None, None]


class BackgroundTasks:
    """First in, first out. Call `add` and `close` with the engine's lock held, all other methods on the engine's
    thread."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Slices, Future[None]]] = deque()
        self._steps = 0

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def add(self, slices: Slices) -> "Future[None]":
        """Queues a task. It yields wherever a step may run in between. The future completes or fails as the task does.
        Cancelling the future drops the rest of the task; only the engine's thread may do so."""
        future: Future[None] = Future()
        self._waiting.append((slices, future))
        return future

    def after_step(self) -> None:
        """Runs a slice if it is time for one."""
        self._steps += 1
        if self._steps % STEPS_PER_SLICE == 0:
            self.run_slice()

    def run_slice(self) -> None:
        """Runs the next slice of the first task. An error goes to the task's future."""
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
            logger.warning("a background task failed", exc_info=True)
            future.set_exception(error.with_traceback(None))
        else:
            return
        self._waiting.popleft()

    def close(self, error: NeapError) -> None:
        """Fails all tasks with `error`."""
        while self._waiting:
            future = self._waiting.popleft()[1]
            if not future.cancelled():
                future.set_exception(error)
