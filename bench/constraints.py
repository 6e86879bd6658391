"""What a JSON Schema costs, and what it gives (docs/decisions/016): `full` and `exact` under the same schemas.

    python -m bench.constraints --model DIR --router FOLDER [--dtype float32] [--max-tokens 160] [--at-once 1 8]
        [--file FILE]

Both sides answer every prompt of --file, by default bench/data/schemas.jsonl, in turn, greedily, the last ones so many
at once. The time of masks is what asking the grammar and choosing again take within the steps of `exact`.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.machine import described
from bench.options import add_device, add_dtypes, each_model, load, make_parser
from bench.prompts import encode_turns
from bench.stopwatch import seconds_of
from bench.table import head, row
from shared.constraints.constraint import Constraint
from shared.constraints.state import ConstraintState
from shared.engine.engine import Engine
from shared.engine.request.request import FinishReason, Generation
from shared.ladder.folder import read_ladder
from shared.ladder.proposers import GRAMMAR
from shared.model import host_choices

FILE = Path(__file__).parent / "data" / "schemas.jsonl"
SIDES = ("full", "exact")
COLUMNS = (
    *("at once", "same tokens", "complete", "proposer grammar", "tokens per pass"),
    *("full, tokens/s", "exact, tokens/s", "exact / full", "masks per token", "share of the time"),
)


@contextmanager
def clocked() -> Iterator[list[float]]:
    """Yields a list of the seconds that asking the grammar and choosing again take on the engine's thread."""
    spent: list[float] = []
    is_running = False

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal is_running
            if is_running:  # the outer call counts
                return function(*args)
            is_running, start = True, time.perf_counter()
            try:
                return function(*args)
            finally:
                is_running = False
                spent.append(time.perf_counter() - start)

        return run

    with ExitStack() as stack:
        for name in ("forced", "allows", "allowed"):
            own = timed(getattr(ConstraintState, name))
            stack.enter_context(patch.object(ConstraintState, name, own))
        again = timed(host_choices.allowed_only)
        stack.enter_context(patch.object(host_choices, "allowed_only", again))
        yield spent


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_device(parser)
    add_dtypes(parser)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--file", type=Path, default=FILE, help="JSON lines: prompt, and schema or parameters")
    for options in each_model(parser):
        loaded, ladder = load(options), read_ladder(options.router)
        records = [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
        jobs = [
            (
                encode_turns(loaded, [own["prompt"]]),
                Constraint(json_schema=json.dumps(own.get("schema") or own["parameters"])),
            )
            for own in records
        ]
        with Engine(loaded, ladder, prefix_cache_bytes=0) as engine, clocked() as spent:
            engine.warm_up()

            answer = partial(answered, engine, options.max_tokens)
            for ids, constraint in jobs:  # compiles
                engine.generate(ids, policy="exact", constraint=constraint, max_tokens=1)
            answer(jobs[0], "exact")  # touches memory
            print(described(options.device))
            head(*COLUMNS)
            for at_once in options.at_once:
                print_row(jobs, at_once, answer, spent)


def answered(engine: Engine, max_tokens: int, job: tuple[list[int], Constraint], policy: str) -> Generation:
    ids, constraint = job
    return engine.generate(ids, policy=policy, constraint=constraint, max_tokens=max_tokens)


def print_row(jobs: list[Any], at_once: int, answer: Callable[[Any, str], Generation], spent: list[float]) -> None:
    """Both sides answer each group of `at_once` prompts in turn."""
    said: dict[str, list[Generation]] = {side: [] for side in SIDES}
    seconds = dict.fromkeys(SIDES, 0.0)
    masks_s = 0.0
    groups = [jobs[i : i + at_once] for i in range(0, len(jobs) - at_once + 1, at_once)]
    with ThreadPoolExecutor(at_once) as pool:
        for group in groups:
            for side in SIDES:
                spent.clear()
                seconds[side] += seconds_of(
                    lambda side=side, group=group: said[side].extend(  # type: ignore[misc]
                        pool.map(answer, group, [side] * len(group))
                    )
                )
                masks_s += sum(spent) if side == "exact" else 0.0
    exact = said["exact"]
    num_tokens = sum(len(one.token_ids) for one in exact)
    num_same = sum(a.token_ids == b.token_ids for a, b in zip(*said.values(), strict=True))
    num_complete = sum(one.finished.reason is FinishReason.EOS for one in exact)
    num_of_grammar = sum(one.stats.exits.get(GRAMMAR, (0, 0))[1] for one in exact)
    num_passes = sum(1 + one.stats.num_verify_passes for one in exact)
    rates = {side: num_tokens / seconds[side] for side in SIDES}
    row(
        at_once,
        f"{num_same} of {len(exact)}",
        f"{num_complete} of {len(exact)}",
        f"{num_of_grammar / num_tokens:.0%}",
        f"{num_tokens / num_passes:.2f}",
        f"{rates['full']:.1f}",
        f"{rates['exact']:.1f}",
        f"{rates['exact'] / rates['full']:.2f}",
        f"{masks_s / num_tokens * 1e6:.0f} us",
        f"{masks_s / seconds['exact']:.1%}",
    )


if __name__ == "__main__":
    main()
