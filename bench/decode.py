"""Tokens per second while decoding: Hugging Face's `generate`, our full depth, and `exact` with all rungs or parts of the ladder.

    python -m bench.decode --model DIR --router FOLDER [--device cuda] [--per-task 5] [--levers]

All sides answer every prompt in turn, in an order that rotates. The decoding time runs from the first token to the last. Greedy,
batch 1, at most 64 new tokens; float32 on a CPU, the checkpoint's own dtype on a GPU. `--levers`: also `exact` with each part alone.
"""

import json
import math
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.hugging_face import HF, Run, Side, hugging_face
from bench.machine import described
from bench.options import add_device, add_prompts, make_parser, parsed
from bench.prompts import (
    PLAIN_TEXT_NOTE,
    BenchPrompt,
    encode_turns,
    read_prompts,
    takes_chat,
)
from inference_service.engine.engine import Engine
from inference_service.engine.request.request import GenerationRequest, StoppingParams, TokenChunk
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.load import LoadedModel, load_model
from shared.model.own_thread import run_in_own_thread

FULL, EXACT = "full", "exact"
MIN_TOKENS = 8


def neap(engine: Engine, policy: DepthPolicy, ladder: Ladder | None, max_tokens: int) -> Side:
    """A `Side` that answers with the engine, greedily."""

    def run(ids: list[int]) -> Run:
        request = GenerationRequest(
            tuple(ids), stopping=StoppingParams(max_tokens=max_tokens), policy=policy
        )
        start = time.perf_counter()
        tokens: list[int] = []
        for event in engine.submit(request, ladder).events():
            if isinstance(event, TokenChunk):
                tokens += [token.token_id for token in event.tokens]
            else:
                depth = event.depth
                return Run(
                    tuple(tokens),
                    event.decode_s,
                    time.perf_counter() - start,
                    depth.num_layer_executions,
                    depth.num_drafted,
                    depth.num_accepted,
                    depth.num_deep_passes,
                )
        raise AssertionError("the generation ended without a result")

    return run


def levers(ladder: Ladder, vocabulary_size: int) -> dict[str, Ladder]:
    """Ladders that hold only a part of `ladder`, by name."""
    no_tables = replace(ladder, suffix_router=None, successors=None, successor_router=None)
    no_exits = replace(ladder, exits=(), draft_vocabulary=None)
    found = {
        "suffix lookup": replace(no_exits, successors=None, successor_router=None),
        "successor table": replace(no_exits, suffix_router=None),
        "both tables": no_exits,
    }
    if ladder.exits:
        found["exits at layers"] = no_tables
        found["exits, whole vocabulary"] = replace(
            no_tables, draft_vocabulary=run_in_own_thread(torch.arange, vocabulary_size)
        )
    return found


def measure(
    loaded: LoadedModel, sides: dict[str, Side], prompts: list[BenchPrompt], seconds: float
) -> dict[str, dict[str, list[Run]]]:
    """Runs by task and side, one per prompt and turn. After `seconds` no further prompt is started."""
    end_s = time.monotonic() + seconds
    results: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    assert loaded.tokenizer is not None
    names = list(sides)
    for number, prompt in enumerate(prompts):
        if time.monotonic() > end_s:
            break
        turns: list[str] = []
        for turn in prompt.turns:
            turns.append(turn)
            ids = encode_turns(loaded, turns)
            shift = number % len(names)
            runs = {name: sides[name](list(ids)) for name in names[shift:] + names[:shift]}
            for name, run in runs.items():
                results[prompt.task][name].append(run)
            answer = loaded.tokenizer.decode(list(runs[FULL].token_ids), skip_special_tokens=True)
            turns.append(str(answer))
        print(f"{number + 1}/{len(prompts)} {prompt.task}", flush=True)
    return results


def summarise(results: dict[str, dict[str, list[Run]]]) -> dict[str, Any]:
    """Figures by task and side, over prompts that full depth answered with at least MIN_TOKENS tokens. Ratios are to our full depth.

    `speed_up`: ratio of the mean tokens per second over prompts, Spec-Bench's measure (2401.07851). `speed_up_median`: median over
    prompts of the ratio of times per token. `speed_up_total`: ratio of the total times of whole answers, prefill included.
    """
    tables: dict[str, Any] = {}
    for task, sides in results.items():
        if all(len(run.token_ids) < MIN_TOKENS for run in sides[FULL]):
            print(f"{task}: no answer has {MIN_TOKENS} tokens; left out")
            continue
        tables[task] = {}
        for name, runs in sides.items():
            pairs = [
                (r, f)
                for r, f in zip(runs, sides[FULL], strict=True)
                if len(f.token_ids) >= MIN_TOKENS
            ]
            tokens = sum(max(len(run.token_ids) - 1, 0) for run, _ in pairs)
            tables[task][name] = {
                "speed_up": statistics.mean(1 / r.per_token_s for r, _ in pairs)
                / statistics.mean(1 / f.per_token_s for _, f in pairs),
                "speed_up_median": statistics.median(
                    f.per_token_s / r.per_token_s for r, f in pairs
                ),
                "speed_up_total": sum(f.total_s for _, f in pairs)
                / sum(r.total_s for r, _ in pairs),
                "tokens_per_s": statistics.median(1 / r.per_token_s for r, _ in pairs),
                "identical": sum(
                    r.token_ids == f.token_ids for r, f in zip(runs, sides[FULL], strict=True)
                ),
                "prompts": len(runs),
                "layers_per_token": sum(r.layer_executions for r, _ in pairs) / max(tokens, 1),
                "accepted": sum(r.accepted for r, _ in pairs),
                "drafted": sum(r.drafted for r, _ in pairs),
                "tokens_per_deep_pass": tokens / max(sum(r.deep_passes for r, _ in pairs), 1),
            }
    return tables


def print_tables(tables: dict[str, Any]) -> None:
    names = list(next(iter(tables.values())))
    tasks = list(tables)
    print("\nspeed-up over full depth per task, and the means over tasks")
    print("| side | " + " | ".join(tasks) + " | mean | of medians | with prefill |")
    print("|---" * (len(tasks) + 4) + "|")
    for name in names:
        cells = " | ".join(f"{tables[task][name]['speed_up']:.2f}" for task in tasks)
        speed_up, median, total = (
            statistics.mean(tables[task][name][key] for task in tasks)
            for key in ("speed_up", "speed_up_median", "speed_up_total")
        )
        print(f"| {name} | {cells} | **{speed_up:.2f}** | {median:.2f} | {total:.2f} |")
    print(
        "\n| side | tokens/s | layer executions per token | tokens per deep pass | accepted / drafted | identical to full |"
    )
    print("|---|---|---|---|---|---|")
    for name in names:
        rows = [tables[task][name] for task in tasks]
        mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
        # `generate` reports none of these.
        depth = " | | "
        if name != HF:
            depth = (
                f"{mean['layers_per_token']:.1f} | {mean['tokens_per_deep_pass']:.2f} | "
                f"{sum(r['accepted'] for r in rows)} / {sum(r['drafted'] for r in rows)}"
            )
        print(
            f"| {name} | {mean['tokens_per_s']:.1f} | {depth} | "
            f"{sum(r['identical'] for r in rows)} of {sum(r['prompts'] for r in rows)} |"
        )


def main() -> None:
    parser = make_parser(__doc__, router=True)
    add_device(parser)
    add_prompts(parser, 0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--levers",
        nargs="*",
        help="also exact with these parts of the ladder alone; all parts if none is named",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="after this time no further prompt is started",
    )
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parsed(parser)
    loaded = load_model(options.model, device=options.device)
    ladder = read_ladder(options.router)
    prompts = read_prompts(options.prompts, options.per_task)
    if not takes_chat(loaded):
        print(PLAIN_TEXT_NOTE)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(loaded, prefix_cache_bytes=0))
        engine.warm_up()
        full, exact = DepthPolicy("full"), DepthPolicy("exact")
        sides: dict[str, Side] = {FULL: neap(engine, full, None, options.max_tokens)}
        if not options.no_hf:
            sides[HF] = stack.enter_context(
                hugging_face(options.model, options.max_tokens, options.device)
            )
        if options.levers is not None:
            for name, part in levers(ladder, loaded.vocabulary_size).items():
                if name in options.levers or not options.levers:
                    sides[name] = neap(engine, exact, part, options.max_tokens)
        sides[EXACT] = neap(engine, exact, ladder, options.max_tokens)
        for side in sides.values():  # warm-up: binds the ladder, touches memory pages
            side(list(range(3, 40)))
        tables = summarise(measure(loaded, sides, prompts, options.seconds))
    print(f"{described(options.device)}, {loaded.model.dtype}")
    if not tables:
        parser.exit(1, "nothing was measured\n")
    print_tables(tables)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
