"""Tokens per second with several requests at once: exact against our full depth, and both against Hugging Face with padding.

    python -m bench.batch --model DIR --router FOLDER [--batch 1 2 4 8 16] [--per-task 2] [--rounds 3]

A closed loop: so many requests are always under way, over the same prompts for both sides, which take turns within a round.
Tokens per second count whole answers, prefill included. Greedy, float32 on CPU, at most 64 new tokens; medians over rounds.
"""

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch
import transformers

from bench.decode import EXACT, FULL, neap
from bench.hugging_face import HF, hugging_face_batch
from bench.prompts import DEFAULT_FILE, read_prompts
from inference_service.engine.engine import Engine
from inference_service.engine.prompt import encode_prompt
from shared.ladder.folder import read_ladder
from shared.ladder.policy import DepthPolicy
from shared.model.load import load_model

MAX_TOKENS = 64
HF_BATCH = 8
Answers = list[tuple[int, ...]]


def closed_loop(
    engine: Engine, policy: str, ladder: object, prompts: Sequence[list[int]], batch: int
) -> tuple[float, Answers]:
    """(tokens per second, answers) with `batch` requests under way."""
    side = neap(engine, DepthPolicy(policy), ladder, MAX_TOKENS)  # type: ignore[arg-type]
    start = time.perf_counter()
    with ThreadPoolExecutor(batch) as pool:
        runs = list(pool.map(side, prompts))
    seconds = time.perf_counter() - start
    return sum(len(run.token_ids) for run in runs) / seconds, [run.token_ids for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", required=True)
    parser.add_argument("--router", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    loaded = load_model(options.model)
    ladder = read_ladder(options.router)
    prompts = [
        list(encode_prompt(loaded, [{"role": "user", "content": prompt.turns[0]}]))
        for prompt in read_prompts(options.prompts, options.per_task)
    ]
    speeds: dict[tuple[str, int], list[float]] = defaultdict(list)
    differing = 0
    with Engine(loaded, prefix_cache_bytes=0) as engine:
        engine.warm_up()
        _, expected = closed_loop(engine, FULL, None, prompts, 1)
        closed_loop(engine, EXACT, ladder, prompts[:2], 2)
        for number in range(options.rounds):
            for batch in options.batch:
                sides = [(FULL, None), (EXACT, ladder)]
                for policy, part in sides[:: 1 if number % 2 else -1]:
                    speed, answers = closed_loop(engine, policy, part, prompts, batch)
                    speeds[policy, batch].append(speed)
                    differing += sum(a != b for a, b in zip(answers, expected, strict=True))
                print(f"round {number + 1} batch {batch}", flush=True)
    if not options.no_hf:
        with hugging_face_batch(options.model, MAX_TOKENS, HF_BATCH) as run:
            for _ in range(options.rounds):
                speeds[HF, HF_BATCH].append(run(prompts))
    median = {key: statistics.median(values) for key, values in speeds.items()}
    print(
        f"{date.today()} {platform.machine()} {torch.get_num_threads()} threads, {torch.__version__}"
    )
    print(f"answers that differ from full depth alone: {differing}")
    print("| requests at once | full tokens/s | exact tokens/s | exact / full | full / full at 1 |")
    print("|---|---|---|---|---|")
    first = median[FULL, options.batch[0]]
    for batch in options.batch:
        full, exact = median[FULL, batch], median[EXACT, batch]
        print(f"| {batch} | {full:.1f} | {exact:.1f} | {exact / full:.2f} | {full / first:.2f} |")
    if (HF, HF_BATCH) in median:
        print(f"HF generate, padded batches of {HF_BATCH}: {median[HF, HF_BATCH]:.1f} tokens/s")
    if options.json:
        options.json.write_text(
            json.dumps({f"{side} {batch}": values for (side, batch), values in speeds.items()})
        )


if __name__ == "__main__":
    main()
