"""Files that others replace while a service runs: Kubernetes changes mounted secrets by turning one symlink.

They are read anew whenever they are needed, a few kilobytes, rather than watched: no notice can be missed and no clock is too coarse.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from shared.errors import InvalidInput

MAX_FILE_BYTES = 1 << 20

T = TypeVar("T")
log = structlog.get_logger("neap.rpc")


class WatchedFiles(Generic[T]):
    """What `parse` makes of the files' bytes, kept up to date. Safe to use from any thread.

    `parse` raises InvalidInput for what cannot be used. At first that is raised; later the last good value stays, and each state of
    the files that is refused is logged and counted once. `num_reloads` and `num_refused` count changes taken over and not.
    """

    def __init__(
        self, kind: str, paths: Sequence[Path], parse: Callable[[Sequence[bytes]], T]
    ) -> None:
        """`kind` is for the log: "certificate". Raises InvalidInput (reason BAD_CONFIGURATION for files that cannot be read)."""
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
        """The newest that is good, as of the last `refresh`."""
        return self._value

    def refresh(self) -> bool:
        """Look at the files again. Whether `value` is another one now. Raises nothing."""
        with self._lock:
            contents: tuple[bytes, ...] | None = None
            try:
                contents = self._read()
                if contents == self._contents:
                    self._refused = None
                    return False
                value = self._parse(contents)
            except InvalidInput as error:
                # The message stands for files that cannot be read at all.
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


def read_capped(path: Path) -> bytes:
    """Raises InvalidInput (BAD_CONFIGURATION) for what cannot be read or is larger than MAX_FILE_BYTES."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read: {error.strerror}", reason="BAD_CONFIGURATION"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(
            f"{path} is larger than {MAX_FILE_BYTES} bytes", reason="BAD_CONFIGURATION"
        )
    return data
