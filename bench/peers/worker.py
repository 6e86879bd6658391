"""The benchmark's side of a worker: a process of its own that runs one engine and sleeps while others are measured."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from bench.peers.engines.serving import Answer, EngineSettings
from shared.errors import NeapError

STOP_TIMEOUT_S = 20.0
LOG_TAIL_LINES = 3


class EngineFailed(NeapError):
    """An engine raised, died or did not answer in time. The message names its log."""

    default_reason = "ENGINE_FAILED"


class Worker:
    """Starts `command` in a session of its own, with its stderr in `log_path`. `close` ends all its processes.

    The process is stopped by SIGSTOP except during calls, so that threads that spin while idle do not disturb other
    engines.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self.ready_s = 0.0
        self._started_s = time.monotonic()
        with log_path.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )
        self._received = b""

    @property
    def pid(self) -> int:
        """The id of the process, which is that of its session and process group as well."""
        return self._process.pid

    def load(self, settings: EngineSettings, timeout_s: float) -> None:
        """Loads the model. `ready_s`: the seconds from the start of the process until the engine has answered its first
        short prompt. Raises `EngineFailed`."""
        self._call({"load": asdict(settings)}, timeout_s)
        self.ready_s = time.monotonic() - self._started_s

    def answer(self, prompts: Sequence[list[int]], max_tokens: int, mode: str, timeout_s: float) -> list[Answer]:
        """Answers of one call, in the order of `prompts`. Raises `EngineFailed`."""
        call = {"prompts": list(prompts), "max_tokens": max_tokens, "mode": mode}
        return [Answer(**answer) for answer in self._call(call, timeout_s)["answers"]]

    def resident_bytes(self) -> int:
        """Resident memory of the worker and its child processes. Pages that they share count for each."""
        worker = psutil.Process(self.pid)
        return sum(one.memory_info().rss for one in (worker, *worker.children(recursive=True)))

    def close(self) -> None:
        """Ends the worker: by closing its stdin, or by SIGKILL if it does not end. Idempotent."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.close()
            self._process.wait(STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass
        finally:
            self._signal(signal.SIGKILL)  # child processes that the engine left, too
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _call(self, call: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(call).encode() + b"\n")
            self._process.stdin.flush()
            reply: dict[str, Any] = json.loads(self._line(time.monotonic() + timeout_s))
        except (BrokenPipeError, ValueError) as error:
            raise self._failed("broke the protocol or ended") from error
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in reply:
            raise self._failed(reply["error"])
        return reply

    def _line(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        while b"\n" not in self._received:
            ready, _, _ = select.select([stream], [], [], max(deadline_s - time.monotonic(), 0.0))
            if not ready:
                # Its late reply would be taken for that of the next call.
                self._signal(signal.SIGKILL)
                raise self._failed("did not answer in time")
            data = os.read(stream, 1 << 20)
            if not data:
                raise self._failed("ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _failed(self, why: str) -> EngineFailed:
        tail = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return EngineFailed(f"{self.name}: {why} (log {self.log_path}: {' / '.join(tail)})")

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return
