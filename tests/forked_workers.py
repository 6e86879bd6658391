"""pytest-xdist's workers as forks of one process that has imported all tests: imports cost once, not once a worker."""

import gc
import multiprocessing
import os
import sys
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from io import StringIO
from types import ModuleType
from typing import Any

import pytest
from execnet import gateway_io
from execnet.gateway_base import Popen2IO


class _ImportsAlone:
    """Modules are collected, which imports them, and tests are not."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        return []


class _Worker(Popen2IO):
    """A fork, and the pipes to it, as execnet has them of a process that it starts itself."""

    def __init__(self) -> None:
        self._ends = [*os.pipe(), *os.pipe()]
        self._process = multiprocessing.get_context("fork").Process(target=self._serve)

    def fork(self, workers: "list[_Worker]") -> None:
        self._others = [end for worker in workers if worker is not self for end in worker._ends]
        self._process.start()

    def _serve(self) -> None:
        read, own_write, own_read, write = self._ends
        for end in (own_write, own_read, *self._others):
            with suppress(OSError):
                os.close(end)
        os.dup2(read, 0)
        os.dup2(write, 1)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        # As in a process of execnet's own: `python -c`, of which processes that tests start import nothing.
        sys.argv, sys.modules["__main__"] = ["-c"], ModuleType("__main__")
        if source := sys.stdin.readline():
            exec(eval(source), vars(sys.modules["__main__"]))

    def connect(self, execmodel: Any) -> "_Worker":
        read, write, answers, own_write = self._ends
        os.close(read)
        os.close(own_write)
        super().__init__(os.fdopen(write, "wb"), os.fdopen(answers, "rb"), execmodel)
        return self

    def close(self) -> None:
        """Ends one that nobody has connected to."""
        for end in self._ends:
            os.close(end)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _read_constants() -> None:
    """Hypothesis draws some examples from the constants of all modules, whose sources it parses at its first example:
    three seconds of each process."""
    if find_spec("hypothesis"):
        from hypothesis import given, settings, strategies

        settings(max_examples=1, database=None)(given(strategies.integers())(lambda _: None))()


def fork_workers(config: pytest.Config) -> None:
    """Before execnet starts a thread. A worker that replaces one that crashed is a process of its own, as ever."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled(), redirect_stdout(StringIO()):
        without = (f"-pno:{name}" for name in ("cacheprovider", "unraisableexception", "xdist"))
        pytest.main(["--collect-only", *without, *config.args], plugins=[_ImportsAlone()])
        _read_constants()
        gc.collect()
        gc.freeze()
        workers = [_Worker() for _ in config.option.tx]
        for worker in workers:
            worker.fork(workers)
    create_io = gateway_io.create_io

    def next_io(spec: Any, execmodel: Any) -> Any:
        return workers.pop(0).connect(execmodel) if workers else create_io(spec, execmodel)

    def end() -> None:
        gateway_io.create_io = create_io
        for worker in workers:
            worker.close()

    gateway_io.create_io = next_io
    config.add_cleanup(end)
