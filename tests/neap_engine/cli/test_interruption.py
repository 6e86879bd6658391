import os
import signal
import threading

import pytest

from neap_engine.cli.interruption import interruptible, interruptible_call


def test_yields_the_items_and_raises_what_reading_them_raises() -> None:
    def items():
        yield 1
        yield 2
        raise ValueError("lost")

    read = interruptible(items())
    assert [next(read), next(read)] == [1, 2]
    with pytest.raises(ValueError, match="lost"):
        next(read)
    assert list(interruptible([])) == []


def test_returns_the_result_of_a_call_or_raises_its_error() -> None:
    assert interruptible_call(lambda: 3) == 3
    with pytest.raises(KeyError):
        interruptible_call(lambda: {}["a"])


def test_ctrl_c_interrupts_the_wait_and_never_the_call() -> None:
    interrupted = threading.Event()
    ended = threading.Event()

    def call() -> None:
        assert threading.current_thread() is not threading.main_thread()
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait()
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        interruptible_call(call)
    interrupted.set()
    assert ended.wait(timeout=30)
