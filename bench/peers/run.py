"""Starts the workers and lets them take turns, prompt by prompt, so that a busy machine slows all of them alike."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import TypeVar

from bench.peers.catalogue import OURS, PEERS, ROUNDED
from bench.peers.engines.serving import Answer, EngineSettings
from bench.peers.environment import worker_environment
from bench.peers.figures import Row, num_same, rates
from bench.peers.worker import EngineFailed, Worker

LOAD_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 3600.0  # a llama.cpp reads 32,000 tokens of a 1.5B model on two cores in half an hour

Prompts = Sequence[list[int]]
Say = Callable[[str], None]
Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Planned:
    """A worker that can be started. `weights`: what the table calls the format."""

    title: str
    weights: str
    command: list[str]
    settings: EngineSettings

    def engine(self, mode: str) -> str:
        """What the table calls the engine in one of its modes."""
        return f"{self.title} {mode}".strip()

    def name(self, mode: str) -> str:
        """What the table calls the row of a mode, and logs the worker."""
        return f"{self.engine(mode)} {self.weights}"


def start(
    stack: ExitStack, planned: Iterable[Planned], logs: Path, failures: dict[str, str], say: Say
) -> list[tuple[Planned, Worker]]:
    """Starts and loads the workers one after the other; `stack` ends them. Those that fail are added to `failures`."""
    logs.mkdir(parents=True, exist_ok=True)
    found = []
    for plan in planned:
        modes = plan.settings.modes
        name = plan.name(modes[0] if len(modes) == 1 else "")
        log_path = logs / f"{name.replace(' ', '-')}.log"
        worker = Worker(name, plan.command, worker_environment(), log_path)
        stack.callback(worker.close)
        try:
            worker.load(plan.settings, LOAD_TIMEOUT_S)
        except EngineFailed as error:
            worker.close()
            failures[name] = error.message
            say(f"left out: {error.message}")
            continue
        say(f"{name}: ready in {worker.ready_s:.1f} s")
        found.append((plan, worker))
    return found


def measure(
    started: Sequence[tuple[Planned, Worker]],
    prompts: Prompts,
    max_tokens: int,
    batch: int,
    num_rounds: int,
    failures: dict[str, str],
    say: Say,
) -> list[Row]:
    """Rows of the table. The first worker's answers in its first mode are the reference. Raises `EngineFailed` if it
    fails there.

    An untimed turn comes before each part, so that nothing is used for the first time while it is measured.
    """
    owners = {plan.name(mode): (plan, worker, mode) for plan, worker in started for mode in plan.settings.modes}
    contenders = contenders_of(started, max_tokens)
    say("reference answers")
    first = next(iter(contenders.values()))
    reference = [first([ids])[0] for ids in prompts]
    lengths = [len(answer.token_ids) for answer in reference]
    single: list[Prompts] = [[ids] for ids in prompts]
    several: list[Prompts] = [[prompts[index] for index in group] for group in groups(lengths, batch)]
    rounds = []
    for part, tasks in (("one request", single), (f"{batch} at once", several)):
        say(part)
        take_turns(contenders, tasks[:1], 1, failures)
        rounds.append(take_turns(contenders, tasks, num_rounds, failures, say))
    rows = []
    for name, (plan, worker, mode) in owners.items():
        if name in failures:
            continue
        own, end_ids = rounds[0][name], plan.settings.end_ids
        rows.append(
            Row(
                plan.engine(mode),
                plan.weights,
                base_of(plan, [other for other, _ in started]),
                *rates(own, rounds[1][name]),
                sum(num_same(calls, reference, end_ids) for calls in own),
                sum(len(calls) for calls in own),
                worker.ready_s,
                worker.resident_bytes(),
            )
        )
    return rows


def contenders_of(
    started: Sequence[tuple[Planned, Worker]], max_tokens: int
) -> dict[str, Callable[[Prompts], list[Answer]]]:
    """By the name of its row, what answers prompts in each mode of each worker."""

    def ask(worker: Worker, mode: str, task: Prompts) -> list[Answer]:
        return worker.answer(task, max_tokens, mode, ANSWER_TIMEOUT_S)

    return {plan.name(mode): partial(ask, worker, mode) for plan, worker in started for mode in plan.settings.modes}


def first_tokens(
    contenders: Mapping[str, Callable[[Prompts], list[Answer]]],
    prompts: Prompts,
    lengths: Sequence[int],
    num_rounds: int,
    failures: dict[str, str],
    say: Say,
) -> dict[str, list[float]]:
    """Seconds until the first token of answers to a prompt of each length, in tokens, by contender: medians over
    rounds. Such a prompt is all `prompts` one after another, as often as needed. An untimed turn comes before."""
    tasks: list[Prompts] = [[[*islice(cycle(chain(*prompts)), length)]] for length in lengths]
    take_turns(contenders, tasks[:1], 1, failures)
    rounds = take_turns(contenders, tasks, num_rounds, failures, say)
    return {
        name: [statistics.median(answer.times_s[0] for (answer,) in calls) for calls in zip(*own, strict=True)]
        for name, own in rounds.items()
    }


def groups(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Groups of `size` prompts, by index, for requests that run at once: the longest answers together, so that all
    run long.

    `lengths`: tokens of each prompt's reference answer. A prompt repeats only if there are fewer than `size`.
    """
    longest = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if len(longest) < size:
        return [[longest[index % len(longest)] for index in range(size)]]
    return [longest[first : first + size] for first in range(0, len(longest) // size * size, size)]


def take_turns(
    contenders: Mapping[str, Callable[[Task], Result]],
    tasks: Sequence[Task],
    num_rounds: int,
    failures: dict[str, str],
    show: Callable[[str], None] = lambda line: None,
) -> dict[str, list[list[Result]]]:
    """Results by contender, round and task.

    Each contender does a task before any does the next. The order rotates by one with each task. A contender that
    raises `EngineFailed` is left out from then on: its message is added to `failures`, its results are dropped.
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


def base_of(planned: Planned, all_planned: Iterable[Planned]) -> tuple[str, ...]:
    """The names of the rows of our full and exact that a worker is compared with: those with its weights.

    Another engine is compared with ours that rounds inputs as it does, if that is among `all_planned`.
    """
    ours, weights = PEERS[OURS], planned.weights
    if planned.title != ours.title:
        measured = {each.weights for each in all_planned if each.title == ours.title}
        alike = (name for name, kept in ROUNDED.items() if kept == weights and name in measured)
        weights = next(alike, weights)
    return tuple(f"{ours.title} {mode} {weights}" for mode in ours.modes)
