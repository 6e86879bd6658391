"""Workers as forks of a process that has imported what they run, which takes most of a start: for tests that start many
and are of something else."""

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]


class ForkedWorker:
    """What tests use of a `subprocess.Popen` of `python -m inference_service ARGUMENTS`. It is killed at the end of
    this process. Its stdout goes to `output`; without, to `stdout`, a pipe."""

    def __init__(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        *,
        errors: IO[bytes] | int = subprocess.DEVNULL,
        output: IO[bytes] | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded_worker"])
        with ExitStack() as stack:
            reader, writer = map(stack.enter_context, Pipe(duplex=False))
            nowhere = stack.enter_context(Path(os.devnull).open("r+b"))
            self.stdout = os.fdopen(os.dup(reader.fileno()))
            files = (nowhere, output or writer, nowhere if isinstance(errors, int) else errors)
            ends = [stack.enter_context(Connection(os.dup(file.fileno()))) for file in files]
            self._process = context.Process(target=_run, args=(list(arguments), dict(variables), ends), daemon=True)
            self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired("a worker", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(arguments: Sequence[str], variables: Mapping[str, str], ends: Sequence[Connection]) -> None:
    """In the fork: what the first lines of `inference_service/__main__.py` do."""
    from inference_service.__main__ import main
    from shared.rpc.logs import log_all_output

    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    gc.disable()
    log_all_output()
    gc.freeze()
    sys.exit(main(arguments))
