"""What was proven and measured of one model with one build on one machine, by name."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Facts:
    """`earlier`: what an earlier start has found out, as JSON gives it. What this one finds out is in `values`, too.
    `keep` writes them for the next start. Thread-safe.

    Facts of another model, build or machine must never get here: see `remembered.key`.
    """

    def __init__(
        self,
        earlier: dict[str, Any] | None = None,
        keep: Callable[[], object] = lambda: None,
    ) -> None:
        self.keep = keep
        self.earlier = dict(earlier or {})
        self.values = dict(self.earlier)
        self._lock = threading.Lock()

    def recall(self, name: str, find_out: Callable[[], T], *, again: bool = False) -> T:
        """The fact `name`: that of an earlier start or call, or else what `find_out` returns, which JSON must be able
        to hold.

        `again`: what was found out in this process is found out again, because the model may have been changed.
        """
        with self._lock:
            if name in (self.earlier if again else self.values):
                known: T = self.values[name]
                return known
        value = find_out()
        self.note(name, value)
        return value

    def note(self, name: str, value: Any) -> None:
        with self._lock:
            self.values[name] = value

    def known(self) -> dict[str, Any]:
        """All of them, as they are now."""
        with self._lock:
            return dict(self.values)

    def forget(self) -> None:
        """Forgets everything."""
        with self._lock:
            self.values.clear()
            self.earlier.clear()
