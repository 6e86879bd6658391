"""A job's process as its service has it: where its files are, what it is told, how it is started and stopped."""

import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

from calibrator_service.job import Report
from shared.calibrator_settings import CalibratorSettings


@dataclass(frozen=True)
class ProcessConfig:
    """The first that a job's process is told. `start`: how often the job has been started. `spec`: bytes of a
    CalibrationSpec of the protos."""

    calibration_id: str
    start: int
    parent_pid: int
    spec: bytes
    work_dir: Path
    settings: CalibratorSettings


class JobFolder:
    """Paths of the job store and of the jobs' files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store, self.lock = root / "jobs.db", root / "service.lock"
        self.work_root, self.log_root = root / "work", root / "logs"

    def work(self, calibration_id: str) -> Path:
        return self.work_root / calibration_id

    def log(self, calibration_id: str) -> Path:
        return self.log_root / f"{calibration_id}.log"


# What it runs; the last argument is the number of its end of the pipe.
PROGRAM: tuple[str, ...] = ("-m", "calibrator_service.worker_process")
TERMINATE_TIMEOUT_S = 3.0


class JobProcess:
    """Started by the constructor, which raises OSError if that fails. `kill` must be called at the end."""

    def __init__(self, config: ProcessConfig, log: Path) -> None:
        self._pipe, theirs = Pipe()
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                # Ctrl-C in a terminal then reaches the service only, and the whole group can be killed.
                start_new_session=True,
            )
        # Prompts may be larger than the pipe, and a process may not get as far as to read them, so a thread sends.
        self._words: queue.SimpleQueue[ProcessConfig | str | None] = queue.SimpleQueue()
        self._words.put(config)
        threading.Thread(target=self._send, name="job-words", daemon=True).start()

    def ask_to_stop(self) -> None:
        self._words.put("stop")

    def hear(self, timeout_s: float) -> Report | None:
        """What the process says next; None if it says nothing in time.
        Raises EOFError once it has ended and everything is heard."""
        has_ended = self._process.poll() is not None
        try:
            if self._pipe.poll(0 if has_ended else timeout_s):
                report: Report = self._pipe.recv()
                return report
        except OSError as error:  # it died while it spoke
            raise EOFError from error
        if has_ended:
            raise EOFError
        return None

    def kill(self) -> None:
        """Kills the process and its group, and waits for its end.
        It need not clean up: a resumed job uses complete files only."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(TERMINATE_TIMEOUT_S)
            except (ProcessLookupError, PermissionError):
                pass
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()
        self._words.put(None)

    def describe_exit(self) -> str:
        """How a process that has been killed or has ended did so, for people."""
        status = self._process.wait()
        if status >= 0:
            return f"with exit status {status}"
        hint = " (out of memory?)" if -status == signal.SIGKILL else ""
        return f"by {signal.Signals(-status).name}{hint}"

    def _send(self) -> None:
        with suppress(OSError):
            while (word := self._words.get()) is not None:
                self._pipe.send(word)
