"""Tokens per second with several requests at once: `exact`, our full depth, and Hugging Face's `generate` in padded batches.

    python -m bench.batch --model DIR --router FOLDER [--device cuda] [--batch 1 2 4 8 16] [--per-task 3] [--rounds 3]

A closed loop keeps B requests running (`--batch`). Both policies get the same prompts and take turns within a round. The time ends
when the first request ends that no other can replace. Greedy, at most 64 new tokens; float32 on a CPU and the checkpoint's own dtype
on a GPU; medians over rounds. There are two tables. Whole answers: each request prefills its prompt. Decoding: the keys and values of
the prompts, except the last token's, are in the prefix cache.

On a CPU, an answer that differs from the one at full depth and batch 1 ends the run. On a GPU, passes of more than 16 tokens run other
kernels than smaller ones, so nearly equal logits may be ranked differently (docs/decisions/015); there, differing answers are counted.
"""

import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from bench.hugging_face import HF, hugging_face_batch
from bench.machine import described
from bench.options import add_device, add_prompts, make_parser, parsed
from bench.prompts import first_turns
from shared.engine.engine import MAX_RUNNING, Engine
from shared.engine.request.request import GenerationRequest, StoppingParams, TokenChunk
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.load import load_model

MAX_TOKENS = 64
HF_BATCH = 8
FULL: Literal["full"] = "full"
EXACT: Literal["exact"] = "exact"
PolicyName = Literal["full", "exact"]
# Size of the prefix cache in bytes per table; None: the engine's default.
TABLES = {"whole answers": 0, "decoding": None}
Answers = list[tuple[int, ...]]


def closed_loop(
    engine: Engine,
    policy: PolicyName,
    ladder: Ladder | None,
    prompts: Sequence[list[int]],
    batch: int,
) -> tuple[float, Answers]:
    """(tokens per second while `batch` requests are running, answers).

    The time ends when the first request ends that no other can replace. Later tokens do not count.
    """
    queue = deque(enumerate(prompts))
    answers: dict[int, tuple[int, ...]] = {}
    arrivals: list[tuple[float, int]] = []
    ran_out: list[float] = []

    def serve() -> None:
        while True:
            try:
                number, prompt_ids = queue.popleft()
            except IndexError:
                ran_out.append(time.perf_counter())
                return
            request = GenerationRequest(
                tuple(prompt_ids),
                stopping=StoppingParams(max_tokens=MAX_TOKENS),
                policy=DepthPolicy(policy),
            )
            tokens: list[int] = []
            for event in engine.submit(request, ladder).events():
                if isinstance(event, TokenChunk):
                    tokens += [token.token_id for token in event.tokens]
                    arrivals.append((time.perf_counter(), len(event.tokens)))
            answers[number] = tuple(tokens)

    start = time.perf_counter()
    with ThreadPoolExecutor(batch) as pool:
        for served in [pool.submit(serve) for _ in range(batch)]:
            served.result()
    end = min(ran_out)
    num_tokens = sum(count for moment, count in arrivals if moment <= end)
    return num_tokens / (end - start), [answers[number] for number in range(len(prompts))]


def main() -> None:
    parser = make_parser(__doc__, router=True)
    add_device(parser)
    add_prompts(parser, 3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parsed(parser)
    loaded = load_model(options.model, device=options.device)
    ladder = read_ladder(options.router)
    prompts = first_turns(loaded, options.prompts, options.per_task)
    tables: dict[str, dict[str, list[float]]] = {}
    differing: dict[str, int] = {}
    most = max(MAX_RUNNING, *options.batch)
    for title in options.tables:
        with Engine(loaded, prefix_cache_bytes=TABLES[title], max_running=most) as engine:
            engine.warm_up()
            tables[title], differing[title] = measure(
                engine, ladder, prompts, options.batch, options.rounds
            )
    print(f"{described(options.device)}, {loaded.model.dtype}")
    for title, speeds in tables.items():
        print_table(title, speeds, differing[title], options.batch)
    if not options.no_hf:
        with hugging_face_batch(options.model, MAX_TOKENS, HF_BATCH, options.device) as run:
            tables[HF] = {"": [run(prompts) for _ in range(options.rounds)]}
        speed = statistics.median(tables[HF][""])
        print(f"HF generate, whole answers in padded batches of {HF_BATCH}: {speed:.1f} tokens/s")
    if options.json:
        options.json.write_text(json.dumps(tables))


def measure(
    engine: Engine,
    ladder: Ladder,
    prompts: Sequence[list[int]],
    batches: Sequence[int],
    rounds: int,
) -> tuple[dict[str, list[float]], int]:
    """(tokens per second by policy and batch, one figure per round; number of answers that differ from full depth at batch 1).

    Raises `SystemExit` if an answer differs on a CPU.
    """
    speeds: dict[str, list[float]] = defaultdict(list)
    num_differing = 0
    _, expected = closed_loop(engine, FULL, None, prompts, 1)
    closed_loop(engine, EXACT, ladder, prompts[:2], 2)
    for number in range(rounds):
        for batch in batches:
            sides: list[tuple[PolicyName, Ladder | None]] = [(FULL, None), (EXACT, ladder)]
            for policy, part in sides[:: 1 if number % 2 else -1]:
                speed, answers = closed_loop(engine, policy, part, prompts, batch)
                speeds[f"{policy} {batch}"].append(speed)
                differing = sum(a != e for a, e in zip(answers, expected, strict=True))
                num_differing += differing
                if differing and engine.loaded.device.type == "cpu":
                    raise SystemExit(
                        f"answers under {policy} at batch {batch} differ from those at full depth and batch 1"
                    )
            latest = ", ".join(
                f"{side} {speeds[f'{side} {batch}'][-1]:.1f}" for side in (FULL, EXACT)
            )
            print(f"round {number + 1}, {batch} at once: {latest} tokens/s", flush=True)
    return dict(speeds), num_differing


def print_table(
    title: str, speeds: dict[str, list[float]], num_differing: int, batches: Sequence[int]
) -> None:
    median = {key: statistics.median(values) for key, values in speeds.items()}
    same = f"{num_differing} answers differ from" if num_differing else "every answer as under"
    print(f"\n{title}; {same} full depth alone")
    print("| requests at once | full tokens/s | exact tokens/s | exact / full | full / full at 1 |")
    print("|---|---|---|---|---|")
    first = median[f"{FULL} {batches[0]}"]
    for batch in batches:
        full, exact = median[f"{FULL} {batch}"], median[f"{EXACT} {batch}"]
        print(f"| {batch} | {full:.1f} | {exact:.1f} | {exact / full:.2f} | {full / first:.2f} |")


if __name__ == "__main__":
    main()
