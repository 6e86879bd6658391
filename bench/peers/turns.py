"""Contenders take turns, prompt by prompt, so that a busy machine slows all of them alike."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from bench.peers.worker import EngineFailed

Task = TypeVar("Task")
Result = TypeVar("Result")


def take_turns(
    contenders: Mapping[str, Callable[[Task], Result]],
    tasks: Sequence[Task],
    num_rounds: int,
    failures: dict[str, str],
    show: Callable[[str], None] = lambda line: None,
) -> dict[str, list[list[Result]]]:
    """Results by contender, round and task.

    Each contender does a task before any does the next. The order rotates by one with each task. A contender that raises `EngineFailed`
    is left out from then on: its message is added to `failures`, its results are dropped. Contenders in `failures` are not asked.
    """
    results: dict[str, list[list[Result]]] = {name: [] for name in contenders}
    names = list(contenders)
    for round_number in range(num_rounds):
        for name in names:
            results[name].append([])
        for number, task in enumerate(tasks):
            shift = (round_number + number) % max(len(names), 1)
            for name in names[shift:] + names[:shift]:
                if name in failures:
                    continue
                try:
                    results[name][-1].append(contenders[name](task))
                except EngineFailed as error:
                    failures[name] = error.message
                    show(f"{name} is left out: {error.message}")
            show(f"round {round_number + 1}/{num_rounds}, {number + 1}/{len(tasks)}")
    return {name: rounds for name, rounds in results.items() if name not in failures}
