import _thread
import threading
import time

import pytest

from shared.model.own_thread import run_in_own_thread


def test_it_returns_what_the_work_returns_from_a_thread_that_has_ended() -> None:
    def work(a: int, *, b: int) -> tuple[int, threading.Thread]:
        return a + b, threading.current_thread()

    total, thread = run_in_own_thread(work, 2, b=3)
    assert total == 5
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_it_raises_what_the_work_raises() -> None:
    def work() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        run_in_own_thread(work)


def test_what_interrupts_the_caller_interrupts_the_work() -> None:
    interrupted: list[threading.Thread] = []

    def work() -> None:
        _thread.interrupt_main()
        deadline_s = time.monotonic() + 30
        try:
            while time.monotonic() < deadline_s:
                pass
        except KeyboardInterrupt:
            interrupted.append(threading.current_thread())

    with pytest.raises(KeyboardInterrupt):
        run_in_own_thread(work)
    [thread] = interrupted
    assert not thread.is_alive()
