"""Tokens per second with several requests at once: `exact` and our full depth. (Other engines: `bench.peers`.)

    python -m bench.batch --model DIR --router FOLDER [--device cuda] [--batch 1 2 4 8 16] [--per-task 3] [--rounds 3]

A closed loop keeps B requests running (`--batch`). Both policies get the same prompts and take turns within a round.
The time ends when the first request ends that no other can replace. Greedy, at most 64 new tokens; weights as they
are stored; medians over rounds. The keys and values of the prompts, except the last token's, are in the prefix cache,
so this is decoding alone.

On a CPU, an answer that differs from the one at full depth and batch 1 ends the run. On a GPU, passes of more than 16
tokens run other kernels than smaller ones, so nearly equal logits may be ranked differently (docs/decisions/008);
there, differing answers are counted.
"""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal

from bench.answers import EngineAnswer, answer_all
from bench.machine import described
from bench.options import add_device, add_dtypes, add_prompts, each_model, load, make_parser
from bench.prompts import first_turns
from bench.table import head, row
from shared.engine.engine import Engine
from shared.engine.memory.budget import MAX_RUNNING
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy

MAX_TOKENS = 64
Answers = list[tuple[int, ...]]


def closed_loop(
    engine: Engine,
    policy: Literal["full", "exact"],
    ladder: Ladder | None,
    prompts: Sequence[list[int]],
    batch: int,
    max_tokens: int = MAX_TOKENS,
) -> tuple[float, Answers]:
    """(tokens per second while `batch` requests are running, answers).

    The time ends when the first request ends that no other can replace. Later tokens do not count.
    """
    queue = deque(enumerate(prompts))
    answers: dict[int, EngineAnswer] = {}
    ran_out: list[float] = []

    def serve() -> None:
        with suppress(IndexError):
            while True:
                number, ids = queue.popleft()
                (answers[number],) = answer_all(engine, [ids], DepthPolicy(policy), ladder, max_tokens=max_tokens)
        ran_out.append(time.perf_counter())

    start = time.perf_counter()
    with ThreadPoolExecutor(batch) as pool:
        for served in [pool.submit(serve) for _ in range(batch)]:
            served.result()
    end = min(ran_out)
    num_tokens = sum(at <= end for answer in answers.values() for at in answer.times_s)
    said = [tuple(answers[number].token_ids) for number in range(len(prompts))]
    return num_tokens / (end - start), said


def measure(
    engine: Engine, ladder: Ladder, prompts: Sequence[list[int]], batches: Sequence[int], rounds: int
) -> tuple[dict[str, list[float]], int]:
    """(tokens per second by policy and batch, one figure per round; number of answers that differ from full depth at
    batch 1).

    Raises `SystemExit` if an answer differs on a CPU.
    """
    speeds: dict[str, list[float]] = defaultdict(list)
    num_differing = 0
    sides: dict[Literal["full", "exact"], Ladder | None] = {"full": None, "exact": ladder}
    _, expected = closed_loop(engine, "full", None, prompts, 1)
    closed_loop(engine, "exact", ladder, prompts[:2], 2)
    for number in range(rounds):
        for batch in batches:
            for policy in list(sides)[:: 1 if number % 2 else -1]:
                speed, answers = closed_loop(engine, policy, sides[policy], prompts, batch)
                speeds[f"{policy} {batch}"].append(speed)
                differing = sum(a != e for a, e in zip(answers, expected, strict=True))
                num_differing += differing
                print(f"round {number + 1}, {batch} at once: {policy} {speed:.1f} tokens/s", flush=True)
                if differing and engine.loaded.device.type == "cpu":
                    raise SystemExit("answers differ from those at full depth and batch 1")
    return dict(speeds), num_differing


def print_table(speeds: dict[str, list[float]], num_differing: int, batches: Sequence[int]) -> None:
    median = {key: statistics.median(values) for key, values in speeds.items()}
    same = f"{num_differing} answers differ from" if num_differing else "every answer as under"
    print(f"{same} full depth alone")
    head("requests at once", "full tokens/s", "exact tokens/s", "exact / full", "full / full at 1")
    for batch in batches:
        full, exact = median[f"full {batch}"], median[f"exact {batch}"]
        ratios = exact / full, full / median[f"full {batches[0]}"]
        row(batch, f"{full:.1f}", f"{exact:.1f}", *(f"{ratio:.2f}" for ratio in ratios))


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_device(parser)
    add_dtypes(parser)
    add_prompts(parser, 3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    for options in each_model(parser):
        loaded, ladder = load(options), read_ladder(options.router)
        prompts = first_turns(loaded, options.prompts, options.per_task)
        if max(options.batch) > len(prompts):
            parser.error(f"{max(options.batch)} requests at once need as many prompts, not {len(prompts)}: --per-task")
        with Engine(loaded, max_running=max(MAX_RUNNING, *options.batch)) as engine:
            engine.warm_up()
            figures = measure(engine, ladder, prompts, options.batch, options.rounds)
        print(f"{described(options.device)}, computes in {loaded.compute_dtype}")
        print_table(*figures, options.batch)


if __name__ == "__main__":
    main()
