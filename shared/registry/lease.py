"""A lease that gives one holder at a time the right to remove objects from a bucket.
Publishers can see that it is held.

The lease is one object, which its holder rewrites every few seconds. A process that sees it unchanged for long enough,
by its own clock, treats the holder as dead. The holder may stand still at any point and go on later, so it never judges
by its own clock whether it still holds the lease. Each renewal has a time by the object store's clock. If two of them
lie too far apart, the lease was lost in between. Removals carry the time when the lease ends, and the store refuses
them afterwards.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from shared.errors import Conflict, Unavailable
from shared.registry.sealed import open_sealed, seal
from shared.timeouts import COMMIT_S

if TYPE_CHECKING:
    from shared.registry.bucket_store import BucketStore

PATH = "sweep.json"
RENEW_S = 5.0
# How long after a renewal the store accepts removals, and after how long without a change others treat the holder as
# dead. The difference covers times in whole seconds and how long the store takes to carry out what it has accepted.
TRUST_S, DEAD_S = 45.0, 60.0


class LeaseWatch:
    """A `SweepWatch`. Not thread-safe."""

    # A sweep that takes its lease after the look waits for longer than this before it reads the journals.
    safe_s = COMMIT_S

    def __init__(self, objects: "BucketStore", *, dead_s: float = DEAD_S) -> None:
        self._objects = objects
        self._dead_s = dead_s
        self._seen: tuple[bytes, float] | None = None

    def is_held(self) -> bool:
        """Query the object store. A lease that did not change for `dead_s` while it was watched counts as not held."""
        data = self._objects.get(PATH)
        now_s = time.monotonic()
        if data is None:
            self._seen = None
            return False
        if self._seen is None or self._seen[0] != data:
            self._seen = data, now_s
        return now_s - self._seen[1] < self._dead_s


class Lease:
    """The `SweepLease` of its holder, valid inside the block of `held`.

    `ends_at_s`: when it ends unless it is renewed, in Unix seconds by the store's clock. None before it is taken.
    """

    def __init__(self, objects: "BucketStore") -> None:
        self._objects = objects
        self._id = uuid.uuid4().hex
        self._beat = 0
        self._renewed_s = time.monotonic()
        self.ends_at_s: float | None = None

    def _content(self) -> bytes:
        return seal({"lease_id": self._id, "beat": self._beat})

    def _is_own(self) -> bool:
        record = self._objects.get(PATH)
        return record is not None and open_sealed(record, PATH)["lease_id"] == self._id

    def renew(self) -> float:
        """Renew the lease if that is due, and return `ends_at_s`. Call it before every removal, and every few seconds.

        Raises Conflict (SWEEP_TAKEN_OVER), and Unavailable, also if the lease has run out (SWEEP_TOO_SLOW).
        """
        now_s = time.monotonic()
        if self.ends_at_s is not None and now_s - self._renewed_s < RENEW_S:
            return self.ends_at_s
        if not self._is_own():
            raise Conflict("another sweep has taken over", reason="SWEEP_TAKEN_OVER")
        self._beat += 1
        self._objects.replace(PATH, self._content())
        written_at_s = self._objects.last_modified_s(PATH)
        if self.ends_at_s is not None and written_at_s > self.ends_at_s:
            raise Unavailable(
                "the sweep stood still until its lease had run out; it removes nothing more", reason="SWEEP_TOO_SLOW"
            )
        self._renewed_s, self.ends_at_s = now_s, written_at_s + TRUST_S
        return self.ends_at_s

    def wait(self, seconds: float) -> None:
        """Sleep and keep the lease renewed."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self.renew()
            time.sleep(min(left_s, RENEW_S))
        self.renew()

    def now_s(self) -> float:
        return self._objects.last_modified_s(PATH)

    @contextmanager
    def held(self, *, dead_s: float = DEAD_S) -> Iterator["Lease"]:
        """Take the lease, from a dead holder after `dead_s`. Raises Conflict if another process holds it."""
        if not self._objects.create(PATH, self._content()):
            watch = LeaseWatch(self._objects, dead_s=dead_s)
            end_s = time.monotonic() + dead_s + RENEW_S
            while watch.is_held():
                if time.monotonic() > end_s:
                    raise Conflict("another sweep is running", reason="SWEEP_RUNNING")
                time.sleep(min(1.0, dead_s / 4))
            self._objects.replace(PATH, self._content())
        try:
            self.renew()
            yield self
        finally:
            # If the lease cannot be removed, publishers wait for it for at most a minute.
            # A late removal could hit another's lease.
            with suppress(Unavailable):
                if self.ends_at_s is not None and self._is_own():
                    self._objects.remove_before(PATH, self.ends_at_s)
