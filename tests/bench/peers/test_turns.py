"""Turns: each contender does a task before any does the next, and one that fails is left out without disturbing the others."""

from collections.abc import Callable

from bench.peers.turns import take_turns
from bench.peers.worker import EngineFailed


def test_contenders_alternate_and_the_first_changes() -> None:
    order: list[tuple[str, int]] = []

    def contender(name: str) -> Callable[[int], int]:
        def run(task: int) -> int:
            order.append((name, task))
            return task * 10

        return run

    results = take_turns({name: contender(name) for name in "abc"}, [1, 2], 2, {})
    assert results == {name: [[10, 20], [10, 20]] for name in "abc"}
    assert [name for name, _ in order] == [*"abc", *"bca", *"bca", *"cab"]
    assert [task for _, task in order] == [1, 1, 1, 2, 2, 2] * 2


def test_a_contender_that_fails_is_left_out_for_good() -> None:
    asked = []

    def failing(task: int) -> int:
        asked.append(task)
        if task == 2:
            raise EngineFailed("out of memory")
        return task

    failures: dict[str, str] = {}
    results = take_turns({"good": lambda task: task, "bad": failing}, [1, 2, 3], 2, failures)
    assert results == {"good": [[1, 2, 3]] * 2}
    assert failures == {"bad": "out of memory"}
    assert asked == [1, 2]
    assert take_turns({"bad": failing}, [1], 1, failures) == {}
