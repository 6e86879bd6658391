"""Marks, by which publications and sweeps keep apart.

Whoever publishes or sweeps creates an empty object of a new name, its mark, and only then looks for marks of the other
side. So of a publication and a sweep that begin at once, at least one sees the other. A publication is refused while a
sweep runs. A sweep waits for publications, and removes nothing if they do not end.

The mark of a process that died is removed by whoever finds it after `lasts_s`, by the store's clock. A process that
only stood still finds its own mark missing then: a sweep looks before each removal, a publication before its record
and, if it took long, before its answer.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from shared.errors import Unavailable
from shared.registry.store import Store
from shared.timeouts import PUBLICATION_LASTS_S, PUBLICATIONS_WAIT_S, SWEEP_LASTS_S

POLL_S = 0.5
# A mark that is not removed keeps the other side waiting.
_ATTEMPTS_TO_REMOVE = 2
# A look for one's own mark that takes this share of the time for which it counts is repeated.
_LONG_LOOK = 0.1


@dataclass(frozen=True)
class Side:
    """`lasts_s`: how long a mark counts."""

    folder: str
    lasts_s: float
    one: str


PUBLICATIONS = Side("publications", PUBLICATION_LASTS_S, "a publication")
SWEEPS = Side("sweeps", SWEEP_LASTS_S, "a sweep")


def elapsed_s() -> float:
    """Return the seconds of a clock that, where there is one, also runs while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Mark:
    """The mark of one publication or sweep."""

    def __init__(self, store: Store, side: Side) -> None:
        self._store = store
        self._side = side
        self._path = f"{side.folder}/{uuid.uuid4().hex}"
        self._began_s = elapsed_s()
        store.create(self._path, b"")

    def check(self) -> None:
        """Raise Unavailable (PUBLICATION_TOO_SLOW, SWEEP_TOO_SLOW) if the mark has been removed."""
        asked_s, is_there = elapsed_s(), self._store.exists(self._path)
        while is_there and elapsed_s() - asked_s > self._side.lasts_s * _LONG_LOOK:
            # The process stood still meanwhile, so the answer is old.
            asked_s, is_there = elapsed_s(), self._store.exists(self._path)
        if not is_there:
            raise Unavailable(
                f"{self._side.one} that has not ended after {self._side.lasts_s:g} s counts as dead, and this one did "
                "not; repeat it",
                reason="SWEEP_TOO_SLOW" if self._side.folder == SWEEPS.folder else "PUBLICATION_TOO_SLOW",
            )

    def check_if_late(self) -> None:
        """`check` if the mark is so old that it may have been removed."""
        if elapsed_s() - self._began_s >= self._side.lasts_s / 2:
            self.check()

    def now_s(self) -> float:
        """Return when the mark was created, in Unix seconds by the store's clock. Raises as `check`."""
        self.check()
        return self._store.last_modified_s(self._path)

    def remove(self) -> None:
        for _ in range(_ATTEMPTS_TO_REMOVE):
            with suppress(Unavailable):
                self._store.remove(self._path)
                return

    def running(self, side: Side) -> tuple[str, str] | None:
        """Return since when the oldest of the other side runs and until when its mark counts, None if none runs. Remove
        the marks of those that are dead."""
        for mark in sorted(self._store.objects(side.folder), key=lambda mark: mark.last_modified_s):
            began_s = mark.last_modified_s
            if self.now_s() - began_s < side.lasts_s:
                return _text(began_s), _text(began_s + side.lasts_s)
            self._store.remove(mark.path)
        return None


def _text(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")


@contextmanager
def publishing(store: Store) -> Iterator[Mark]:
    """A block in which contents are stored and then named by a record. Raises Unavailable (SWEEP_RUNNING)."""
    mark = Mark(store, PUBLICATIONS)
    try:
        if found := mark.running(SWEEPS):
            since, until = found
            raise Unavailable(
                f"a sweep of the registry has been running since {since}; nothing can be published until it has ended, "
                f"at the latest at {until}",
                reason="SWEEP_RUNNING",
                metadata={"since": since, "until": until},
            )
        yield mark
    finally:
        mark.remove()


@contextmanager
def sweeping(store: Store) -> Iterator[Mark]:
    """A block in which unused contents are removed. Raises Unavailable (PUBLICATION_RUNNING)."""
    mark = Mark(store, SWEEPS)
    try:
        give_up_at = time.monotonic() + PUBLICATIONS_WAIT_S
        while found := mark.running(PUBLICATIONS):
            since, until = found
            if time.monotonic() >= give_up_at:
                raise Unavailable(
                    f"a publication has been running since {since}; if it does not end, a sweep can begin at {until}",
                    reason="PUBLICATION_RUNNING",
                    metadata={"since": since, "until": until},
                )
            time.sleep(POLL_S)
        yield mark
    finally:
        mark.remove()
