"""Tries in another process whether a client's grammar can be compiled within limits."""

import json
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any

from shared.errors import Unavailable

PROGRAM = Path(__file__).with_name("trial_process.py")
# Grammars that are compiled at once; others wait.
MAX_TRIALS = 2
# A process that has a share of a busy machine answers within it, or has come to its limit.
ANSWER_S = 30.0


@dataclass(frozen=True)
class Verdict:
    """What compiling a grammar has shown. `error`: why it cannot be, or None; then it takes `num_bytes` of memory.
    `is_limit`: the error is one of `limits`. `field` and `place`: where in the request's schemas it is, if that is
    known."""

    error: str | None
    is_limit: bool = False
    num_bytes: int = 0
    field: str | None = None
    place: str | None = None


class Trials:
    """The process is started by the first trial, which takes a second, and again if it has died. Thread-safe.

    `tokenizer`: the arguments of `llguidance.LLTokenizer`.
    """

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._running = BoundedSemaphore(MAX_TRIALS)
        self._control: socket.socket | None = None
        self._end: Callable[[], object] = lambda: None

    def attempt(self, **request: Any) -> Verdict | None:
        """The verdict on `request`, as `trial_process` takes it. None: it exceeds the limits of time, memory or stack.

        Raises `Unavailable` (reason CONSTRAINTS_NOT_COMPILED) if there is no process, or none that begins and answers.
        """
        with self._running:
            try:
                # A process that is ending still takes what is sent to it, and begins nothing.
                lines = self._exchange(request) or self._exchange(request)
                _, *answers = lines
            except (OSError, ValueError) as error:
                raise Unavailable(
                    "the process that compiles constraints does not answer", reason="CONSTRAINTS_NOT_COMPILED"
                ) from error
        verdicts = [json.loads(line) for line in answers if line.endswith(b"\n")]
        return Verdict(**{**verdicts[-1], "error": verdicts[-1]["error"] or None}) if verdicts else None

    def _exchange(self, request: dict[str, Any]) -> list[bytes]:
        """What the process writes. Nothing: it has ended before it began, and the next exchange starts another."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                control = self._send(theirs)
            ours.settimeout(ANSWER_S)
            lines: list[bytes] = []
            with suppress(ConnectionError):
                ours.sendall(json.dumps(request).encode())
                ours.shutdown(socket.SHUT_WR)
                with ours.makefile("rb") as stream:
                    lines = stream.read().splitlines(keepends=True)
        if not lines:
            with self._lock:
                if self._control is control:
                    self._drop()
        return lines

    def _send(self, channel: socket.socket) -> socket.socket:
        """Gives the process a socket to answer through, and returns the one that controls the process."""
        with self._lock:
            for is_last in (False, True):
                try:
                    self._control = self._control or self._start()
                    socket.send_fds(self._control, [b"."], [channel.fileno()])
                    break
                except OSError:
                    self._drop()
                    if is_last:
                        raise
            assert self._control is not None
            return self._control

    def _drop(self) -> None:
        self._end()
        self._control = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Ctrl-C in a terminal then reaches the worker only.
                start_new_session=True,
            )
        self._end = weakref.finalize(self, _end, ours, process)
        assert process.stdin is not None
        with process.stdin as stream:
            stream.write(json.dumps(self._tokenizer).encode())
        return ours


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.wait()
