"""Runs services as child processes, each in its own process group, and always stops them."""

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

from neap_engine.cli.connection import InterruptibleClient, client_security
from shared.errors import Unavailable

LISTENING = "listening on "
STOP_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 5.0
# How often a process is polled while its end or its address is awaited.
CHECK_ALIVE_S = 0.5
LOG_TAIL_LINES = 15
# Ends a service whose parent was killed, by the kernel of Linux.
WITH_PARENT = ("setpriv", "--pdeathsig", "TERM") if shutil.which("setpriv") else ()


class ServiceProcess:
    """Runs `python -m module --listen 127.0.0.1:0 ...` with its log in `log_path`. `niceness`: by how much others come
    before it.

    A context manager: the process is stopped when the block is left, also by an exception.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log_path: Path,
        *,
        listen: str = "127.0.0.1:0",
        niceness: int = 0,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.address = ""
        self._command = [*WITH_PARENT, sys.executable, "-m", module, "--listen", listen, *arguments]
        self._niceness = niceness
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # In its own group: Ctrl-C reaches only this command, which then stops the services in order.
                start_new_session=True,
            )
        if self._niceness:
            os.setpriority(os.PRIO_PROCESS, self._process.pid, self._niceness)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wait_serving(self, timeout_s: float) -> str:
        """Wait until the health check says SERVING and return the address.
        Raises Unavailable with the end of the log."""
        deadline_s = time.monotonic() + timeout_s
        self.wait_listening(timeout_s)
        security = client_security()
        with InterruptibleClient(self.address, security=security, num_attempts=1, timeout_s=5.0) as client:
            while True:
                try:
                    client.wait_ready(timeout_s=CHECK_ALIVE_S)
                    return self.address
                except Unavailable:
                    self.check_alive()
                if time.monotonic() > deadline_s:
                    raise Unavailable(
                        f"the {self.name} is not serving after {timeout_s:g} s; {self._log_tail()}", reason="NOT_READY"
                    )

    def wait_listening(self, timeout_s: float) -> str:
        """Wait until the process listens and return the address. Raises as `wait_serving`."""
        self.address = self._read_address(time.monotonic() + timeout_s)
        return self.address

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait_ended(self, timeout_s: float) -> int | None:
        """Wait up to `timeout_s` for the process to end and return its exit status, negative for a signal.
        None if it still runs."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Send SIGTERM to the process, then SIGKILL to all that is left of its group. Safe to call twice."""
        process = self._process
        if process is None:
            return
        try:
            if process.poll() is None:
                process.terminate()
                process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Needed even if the service has ended: processes that it started may still run.
            _kill_group(process.pid)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            self._process = None

    def _read_address(self, deadline_s: float) -> str:
        """Read HOST:PORT from the line that the service prints when it listens. Raises Unavailable."""
        assert self._process is not None
        assert self._process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()

        def read(stream: IO[str]) -> None:
            # Continues to read after the address, because a full pipe would block the service.
            for line in stream:
                lines.put(line)

        threading.Thread(target=read, args=(self._process.stdout,), daemon=True).start()
        while time.monotonic() < deadline_s:
            try:
                line = lines.get(timeout=0.2)
            except queue.Empty:
                self.check_alive()
                continue
            if line.startswith(LISTENING):
                return line.removeprefix(LISTENING).strip()
        raise Unavailable(f"the {self.name} did not start to listen in time; {self._log_tail()}", reason="NOT_READY")

    def check_alive(self) -> None:
        """Raise Unavailable with the end of the log if the process has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise Unavailable(f"the {self.name} ended with code {code}; {self._log_tail()}", reason="SERVICE_ENDED")

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"its log ({self.log_path}) ends: {' | '.join(lines) or '(empty)'}"


def _kill_group(group: int) -> None:
    """Send SIGKILL to the process group and wait until it is empty, because a killed process does not end at once."""
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def interrupt_on_signals() -> Callable[[], None]:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, so that services are stopped in order. A shell starts background
    jobs with SIGINT ignored.

    Return what raises it again once one has come: Python drops an exception that comes in a destructor, or in a
    callback of C code."""
    came: list[int] = []

    def interrupt(number: int, _: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    return check


# Opening a registry whose servers hang takes 20 s.
START_TIMEOUT_S = 120.0


@contextmanager
def calibration_service() -> Iterator[str]:
    """Yield the address of the service, on loopback. Its log is a file that errors quote. SIGTERM acts like Ctrl-C.

    Raises Unavailable if the service does not start.
    """
    # A job in a container is told to end by SIGTERM, which process number 1 would otherwise ignore.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="neap-") as folder:
            log = Path(folder) / "calibrator.log"
            with ServiceProcess("calibrator", "calibrator_service", [], log) as service:
                yield service.wait_serving(START_TIMEOUT_S)
    finally:
        signal.signal(signal.SIGTERM, before)
