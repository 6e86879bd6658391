"""Background tasks run in slices between steps. Each task's end reaches its future."""

from collections.abc import Generator

import pytest

from shared.engine.background import STEPS_PER_SLICE, BackgroundTasks
from shared.errors import Unavailable


def slices(ran: list[str], name: str, count: int = 2) -> Generator[None, None, None]:
    for _ in range(count):
        ran.append(name)
        yield


def failing() -> Generator[None, None, None]:
    yield
    raise ZeroDivisionError


def finish(tasks: BackgroundTasks) -> None:
    while not tasks.is_empty:
        tasks.run_slice()


def test_one_slice_runs_after_every_few_steps() -> None:
    tasks, ran = BackgroundTasks(), []
    tasks.add(slices(ran, "a", count=10))
    for _ in range(3 * STEPS_PER_SLICE):
        tasks.after_step()
    assert len(ran) == 3


def test_tasks_run_in_order_and_a_failure_reaches_its_own_future() -> None:
    tasks, ran = BackgroundTasks(), []
    first, failed, last = (tasks.add(task) for task in (slices(ran, "a"), failing(), slices(ran, "b")))
    finish(tasks)
    assert ran == ["a", "a", "b", "b"]
    assert first.result(0) is last.result(0) is None
    with pytest.raises(ZeroDivisionError):
        failed.result(0)


def test_a_cancelled_task_runs_no_further() -> None:
    tasks, ran = BackgroundTasks(), []
    cancelled, _ = tasks.add(slices(ran, "a")), tasks.add(slices(ran, "b"))
    tasks.run_slice()
    cancelled.cancel()
    finish(tasks)
    assert ran == ["a", "b", "b"]


def test_closing_fails_every_task() -> None:
    tasks = BackgroundTasks()
    futures = [tasks.add(slices([], "a")) for _ in range(2)]
    futures[0].cancel()
    tasks.close(Unavailable("the worker is stopping"))
    assert tasks.is_empty
    with pytest.raises(Unavailable):
        futures[1].result(0)
