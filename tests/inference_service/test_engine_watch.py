"""A worker whose engine hangs ends; one whose engine is busy or idle does not."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from inference_service.engine_watch import EXIT_STATUS, EngineWatch
from shared.engine.engine import Engine
from shared.model.loaded import wrap_model
from tests.families import build_family
from tests.fixed_costs import fixed_cost_engine
from tests.known_answer import PROMPT
from tests.scripted_ladder import ScriptedLadder

SHORT_S = 0.2


@pytest.fixture
def hung() -> threading.Event:
    return threading.Event()


def watching(engines: list[Engine], hung: threading.Event) -> EngineWatch:
    return EngineWatch(engines, SHORT_S, on_hang=hung.set)


def test_a_step_that_does_not_end_is_found_and_named(hung: threading.Event) -> None:
    released = threading.Event()

    def never_drafts(context: list[int]) -> tuple[int, float]:
        # Watched from now on, as a model that has loaded: the turns before may be slow where much else runs.
        engines.append(engine)
        released.wait()
        return 1, 0.5

    engines: list[Engine] = []
    watch = watching(engines, hung)
    try:
        with (
            capture_logs() as logs,
            fixed_cost_engine(wrap_model(build_family("llama")), ScriptedLadder(never_drafts)) as engine,
        ):
            engine.warm_up()
            thread = threading.Thread(target=engine.generate, args=(PROMPT,))
            thread.start()
            assert hung.wait(60)
            watch.stop()
            released.set()
            thread.join()
    finally:
        released.set()
        watch.stop()
    [entry] = [entry for entry in logs if entry["log_level"] == "critical"]
    assert "never_drafts" in entry["stack"]
    assert engine.turn_began_s is None


@pytest.mark.parametrize("turns", [itertools.repeat(None), itertools.count(), itertools.cycle([None, 7.0])])
def test_an_engine_that_waits_or_goes_on_is_left_alone(turns: Iterator[float | None], hung: threading.Event) -> None:
    looks = threading.Semaphore(0)

    class Going(SimpleNamespace):
        @property
        def turn_began_s(self) -> float | None:
            looks.release()
            return next(turns)

    watch = watching([Going()], hung)  # type: ignore[list-item]
    for _ in range(30):
        assert looks.acquire(timeout=60)
    watch.stop()
    assert not hung.is_set()


def test_the_end_waits_for_no_thread() -> None:
    # The module names the class of engines only in annotations, and importing that takes seconds.
    code = """
import sys, threading, types
sys.modules["shared.engine.engine"] = types.SimpleNamespace(Engine=object)
from inference_service.engine_watch import exit_at_once
threading.Thread(target=threading.Event().wait).start()
print("so far", flush=False)
exit_at_once()
"""
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=buffered, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (EXIT_STATUS, "so far\n")
