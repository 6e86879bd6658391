"""Starts the workers and lets them take turns."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.peers.catalogue import OURS, PEERS, ROUNDED
from bench.peers.engines.serving import Answer, EngineSettings
from bench.peers.environment import worker_environment
from bench.peers.figures import Row, figures
from bench.peers.prompts import groups
from bench.peers.turns import take_turns
from bench.peers.worker import EngineFailed, Worker

LOAD_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 900.0

Prompts = Sequence[list[int]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    """A worker that can be started. `weights`: what the table calls the format."""

    title: str
    weights: str
    modes: tuple[str, ...]
    command: list[str]
    settings: EngineSettings


@dataclass(frozen=True)
class Started:
    planned: Planned
    worker: Worker
    ready_s: float


def start(
    stack: ExitStack, planned: Iterable[Planned], logs: Path, failures: dict[str, str], say: Say
) -> list[Started]:
    """Starts and loads the workers one after the other; `stack` ends them. Those that fail are added to `failures`."""
    logs.mkdir(parents=True, exist_ok=True)
    found = []
    for plan in planned:
        name = f"{plan.title} {plan.weights}"
        log_path = logs / f"{name.replace(' ', '-')}.log"
        worker = Worker(name, plan.command, worker_environment(), log_path)
        stack.enter_context(worker)
        try:
            ready_s = worker.load(plan.settings, LOAD_TIMEOUT_S)
        except EngineFailed as error:
            worker.close()
            failures[name] = error.message
            say(f"left out: {error.message}")
            continue
        say(f"{name}: ready in {ready_s:.1f} s, {worker.stats}")
        found.append(Started(plan, worker, ready_s))
    return found


def measure(
    started: Sequence[Started],
    prompts: Prompts,
    max_tokens: int,
    batch: int,
    num_rounds: int,
    failures: dict[str, str],
    say: Say,
) -> list[Row]:
    """Rows of the table. The first worker's answers in its first mode are the reference. Raises `EngineFailed` if it fails there.

    An untimed turn comes before each part, so that nothing is used for the first time while it is measured.
    """
    owners: dict[str, tuple[Started, str]] = {
        f"{each.planned.title} {mode}".strip() + f" {each.planned.weights}": (each, mode)
        for each in started
        for mode in each.planned.modes
    }

    def ask(worker: Worker, mode: str, task: Prompts) -> list[Answer]:
        return worker.answer(task, max_tokens, mode, ANSWER_TIMEOUT_S)

    contenders: dict[str, Callable[[Prompts], list[Answer]]] = {
        name: partial(ask, each.worker, mode) for name, (each, mode) in owners.items()
    }
    say("reference answers")
    first = next(iter(contenders.values()))
    reference = [first([ids])[0] for ids in prompts]
    lengths = [len(answer.token_ids) for answer in reference]
    single: list[Prompts] = [[ids] for ids in prompts]
    several: list[Prompts] = [
        [prompts[index] for index in group] for group in groups(lengths, batch)
    ]
    rounds = []
    for part, tasks in (("one request", single), (f"{batch} at once", several)):
        say(part)
        take_turns(contenders, tasks[:1], 1, failures)
        rounds.append(take_turns(contenders, tasks, num_rounds, failures, say))
    rows = []
    for name, (each, mode) in owners.items():
        if name in failures:
            continue
        measured = figures(
            rounds[0][name],
            rounds[1][name],
            reference,
            each.planned.settings.end_ids,
            each.ready_s,
            each.worker.resident_bytes(),
        )
        engine = f"{each.planned.title} {mode}".strip()
        base = base_of(each.planned, [other.planned for other in started])
        rows.append(Row(engine, each.planned.weights, measured, base))
    return rows


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
