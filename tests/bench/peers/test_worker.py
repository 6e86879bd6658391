"""The protocol between the benchmark and a worker, with an engine that is a small script."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bench.peers.engines.serving import EngineSettings
from bench.peers.environment import worker_environment
from bench.peers.worker import EngineFailed, Worker

ENGINE = """
import os, subprocess, time
from bench.peers.engines.serving import Answer, serve

class Counting:
    def __init__(self, settings):
        if settings.weights == "none":
            raise ValueError("no such weights")
        self.settings = settings
    def answer(self, prompts, max_tokens, mode):
        os.write(1, b"native noise on stdout\\n")
        print("noise on stdout")
        if mode == "die":
            os._exit(3)
        if mode == "raise":
            raise MemoryError("too long")
        if mode == "slow":
            time.sleep(1.0)
        if mode == "child":
            return [Answer([subprocess.Popen(["sleep", "1000"]).pid], [0.0])]
        answers = []
        for ids in prompts:
            answers.append(Answer([], []))
            for step in range(max_tokens):
                answers[-1].add(sum(ids) + step)
        return answers

serve(Counting)
"""


def settings(weights: str = "float32") -> EngineSettings:
    return EngineSettings("model", weights, 2, 8, 100, (0,))


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    command = [sys.executable, "-c", ENGINE]
    with closing(Worker("counting", command, worker_environment(), tmp_path / "log")) as started:
        yield started


def state(pid: int) -> str:
    """As in /proc/PID/stat; X once the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def test_answers_come_with_their_times(worker: Worker) -> None:
    worker.load(settings(), 60)
    assert worker.ready_s > 0
    first, second = worker.answer([[1, 2], [5]], 3, "", 60)
    assert (first.token_ids, second.token_ids) == ([3, 4, 5], [5, 6, 7])
    times_s = first.times_s + second.times_s
    assert times_s == sorted(times_s)
    assert times_s[0] >= 0
    assert worker.resident_bytes() > 1 << 20


def test_a_worker_is_stopped_between_calls(worker: Worker) -> None:
    worker.load(settings(), 60)
    os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
    assert state(worker.pid) == "T"
    assert worker.answer([[1]], 1, "", 60)[0].token_ids == [1]


def test_an_engine_that_raises_says_why_and_goes_on(worker: Worker) -> None:
    with pytest.raises(EngineFailed, match="ValueError: no such weights"):
        worker.load(settings("none"), 60)
    with pytest.raises(EngineFailed, match="no engine is loaded"):
        worker.answer([[1]], 1, "", 60)
    worker.load(settings(), 60)
    with pytest.raises(EngineFailed, match="MemoryError: too long"):
        worker.answer([[1]], 1, "raise", 60)
    assert worker.answer([[1]], 1, "", 60)[0].token_ids == [1]


@pytest.mark.parametrize(
    ("how", "timeout_s", "says"), [("die", 60, r"ended .*noise on stdout"), ("slow", 0.01, "did not answer in time")]
)
def test_after_a_death_or_a_late_answer_nothing_is_taken_for_the_next(
    worker: Worker, how: str, timeout_s: float, says: str
) -> None:
    worker.load(settings(), 60)
    with pytest.raises(EngineFailed, match=says):
        worker.answer([[1]], 1, how, timeout_s)
    with pytest.raises(EngineFailed, match="ended"):
        worker.answer([[2]], 1, "", 60)


def test_processes_that_an_engine_leaves_end_with_its_worker(worker: Worker) -> None:
    worker.load(settings(), 60)
    (pid,) = worker.answer([[1]], 1, "child", 60)[0].token_ids
    assert state(pid) not in "ZX"
    worker.close()
    while state(pid) not in "ZX":  # the test's time limit ends the wait
        time.sleep(0.01)
