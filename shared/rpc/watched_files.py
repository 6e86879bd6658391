"""Reads files that may be replaced while a service runs. Kubernetes replaces mounted secrets by switching a symlink.

The files have a few kilobytes and are read again whenever they are needed. Compared with file notifications or
modification times, no change can be missed.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog
from neap_client.channel import read_capped

from shared.errors import InvalidInput

T = TypeVar("T")
log = structlog.get_logger("neap.rpc")


class WatchedFiles(Generic[T]):
    """The result of `parse` on the files' bytes, kept up to date. Thread-safe.

    `parse` raises InvalidInput for unusable contents. The constructor passes this error on. Later, the last good value
    stays in use, and each refused state of the files is logged and counted once. `num_reloads` counts accepted changes,
    `num_refused` refused ones.
    """

    def __init__(self, kind: str, paths: Sequence[Path], parse: Callable[[Sequence[bytes]], T]) -> None:
        """`kind` names the files in the log, for example "certificate".

        Raises InvalidInput, with the reason BAD_CONFIGURATION for files that cannot be read.
        """
        self.num_reloads = 0
        self.num_refused = 0
        self._kind = kind
        self._paths = tuple(paths)
        self._parse = parse
        self._lock = threading.Lock()
        self._refused: object = None
        self._contents = self._read()
        self._value = parse(self._contents)

    @property
    def value(self) -> T:
        """The last good value, as of the last `refresh`."""
        return self._value

    def refresh(self) -> bool:
        """Read the files again and return whether `value` has changed. Raises nothing."""
        with self._lock:
            contents: tuple[bytes, ...] | None = None
            try:
                contents = self._read()
                if contents == self._contents:
                    self._refused = None
                    return False
                value = self._parse(contents)
            except InvalidInput as error:
                # If the files cannot be read at all, the message identifies their state.
                state = contents if contents is not None else error.message
                if state != self._refused:
                    self._refused = state
                    self.num_refused += 1
                    log.error(f"{self._kind} not reloaded", why=error.message, reason=error.reason)
                return False
            self._contents, self._value, self._refused = contents, value, None
            self.num_reloads += 1
            log.info(f"{self._kind} reloaded")
            return True

    def _read(self) -> tuple[bytes, ...]:
        return tuple(read_capped(path) for path in self._paths)
