"""`neap up` as a process of the demo."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

import psutil

from neap_engine.cli.console import print_line
from neap_engine.cli.processes import WITH_PARENT
from shared.errors import Unavailable

STOP_TIMEOUT_S = 60.0
POLL_S = 0.2
EXPLAINS_WITHIN_S = 20.0
LOOK_S = 1.0  # how often services are looked for
# Where `neap up` says that its parts listen: at what is before "/v1" OpenAI's clients connect.
WORKER, CALIBRATOR = r"gRPC: (\S+),", r"calibration service: (\S+);"


class System:
    """Runs `neap up FLAGS` with `settings` as variables beside those of this process. What it prints is shown by
    `check`.

    A context manager: all of it ends when the block is left, also by an exception.
    """

    def __init__(self, flags: Sequence[str], settings: Mapping[str, str]) -> None:
        self._command = [*WITH_PARENT, sys.executable, "-m", "neap_engine.cli.main", "up", *flags]
        # The routers of a registry that the user has set are none of the demo's business.
        inherited = {name: value for name, value in os.environ.items() if name != "NEAP_REGISTRY"}
        self._environment = {**inherited, **settings}
        self._news: SimpleQueue[str] = SimpleQueue()
        self._lines: deque[str] = deque(maxlen=50)
        self._process: subprocess.Popen[str] | None = None
        self._services: list[psutil.Process] = []
        self._looked_s = float("-inf")

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Ctrl-C reaches the demo alone, which then ends the system.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._news.put(line.rstrip())

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
            # Where it was killed, its services are told by the kernel, and take a moment.
            _, left = psutil.wait_procs(self._services, STOP_TIMEOUT_S)
            for service in left:
                service.kill()

    def check(self) -> None:
        """Shows what the system has said since. Raises Unavailable (SYSTEM_ENDED), with its last words, if it has
        ended."""
        assert self._process is not None
        has_ended = self._process.poll() is not None
        if has_ended:
            self._reader.join(POLL_S)
        elif time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            with suppress(psutil.NoSuchProcess):
                self._services = psutil.Process(self._process.pid).children(recursive=True)
        try:
            while True:
                line = self._news.get_nowait()
                self._lines.append(line)
                print_line(f"   | {line}")
        except Empty:
            pass
        if has_ended:
            last = self._lines[-1] if self._lines else "it has said nothing"
            raise Unavailable(f"`neap up` has ended: {last.removeprefix('error: ')}", reason="SYSTEM_ENDED")

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """The system says a moment later why calls have failed because a part has died."""
        try:
            yield
        except Unavailable:
            assert self._process is not None
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(EXPLAINS_WITHIN_S)
            self.check()
            raise

    def address(self, pattern: str, timeout_s: float) -> str:
        """Waits for a line with an address. Raises Unavailable (SYSTEM_ENDED, NOT_READY)."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self.check()
            for line in self._lines:
                if match := re.search(pattern, line):
                    return match[1]
            time.sleep(POLL_S)
        raise Unavailable(f"the system is not there after {timeout_s:g} s", reason="NOT_READY")


def new_folder(path: Path) -> Path:
    """An empty folder for one run of the demo, in the place of that of an earlier run. Raises FileExistsError for a
    folder that is not the demo's."""
    mark = path / ".made-by-the-demo"
    if path.exists():
        if not mark.exists():
            raise FileExistsError(17, "exists and is not the demo's; --data-dir names another place", str(path))
        shutil.rmtree(path)
    path.mkdir(parents=True)
    mark.touch()
    return path
