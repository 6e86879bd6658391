"""A model that is served, and how many calls of each client it has."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from shared.engine.engine import Engine
from shared.errors import Exhausted

# So many times what a client leaves free of its places, one behind it may have: four fifths, if there is no other.
SHARE_BEHIND = 4


@dataclass
class ServedModel:
    """A served model. `active`: number of calls that are being prepared, wait or run, by client; `active_behind`: by
    client and whom it asks for."""

    engine: Engine
    max_active: int
    max_active_per_client: int | None
    text_of: Callable[[int], str]
    active: Counter[str] = field(default_factory=Counter)
    active_behind: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def is_busy(self) -> bool:
        """Whether one more call would wait for others."""
        return self.engine.num_waiting > 0 or self.active.total() >= self.engine.max_running

    @contextmanager
    def admitted(self, client: str, behind: str) -> Iterator[None]:
        """Counts a call as active. `behind`: see `on_behalf_of`. Raises Exhausted if there are too many. Only on the
        event loop's thread."""
        if self.active.total() >= self.max_active:
            self._refuse(f"{self.active.total()} requests are waiting or running", "QUEUE_FULL")
        num_active = self.active[client]
        # By default a client may have no more than it leaves free for others, so that none can take all.
        most = self.max_active_per_client or self.max_active - self.active.total()
        if num_active >= most:
            self._refuse(f"{num_active} requests of this client are waiting or running", "CLIENT_LIMIT")
        # By default both sides of `most` move: two more calls of a client leave room for one less.
        num_left = most - num_active if self.max_active_per_client else -((num_active - most) // 2)
        num_behind = self.active_behind[client, behind]
        if behind and num_behind >= SHARE_BEHIND * num_left:
            self._refuse(f"{num_behind} requests of this client, {behind}, are waiting or running", "CLIENT_LIMIT")
        self.active[client] += 1
        self.active_behind[client, behind] += 1
        try:
            yield
        finally:
            self.active -= Counter({client: 1})
            self.active_behind -= Counter({(client, behind): 1})

    def _refuse(self, why: str, reason: str) -> NoReturn:
        raise Exhausted(
            f"{why}; no more are taken",
            reason=reason,
            metadata={"model_id": self.engine.loaded.model_id},
            retry_after_s=1.0,
        )
