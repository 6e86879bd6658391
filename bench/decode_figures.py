"""What `bench.decode` measures: answers to all prompts by all sides in turn, and the figures of each side."""

import statistics
import time
from collections import defaultdict
from typing import Any, Final

from bench.prompts import BenchPrompt, encode_turns
from neap_engine.evaluate.sides import Side, TimedAnswer
from shared.model.loaded import LoadedModel

FULL: Final = "full"
EXACT: Final = "exact"
MIN_TOKENS = 8
# Routers that stay bound, so that no side binds its own anew for each prompt.
MAX_LADDERS = 16


def measure(
    loaded: LoadedModel, sides: dict[str, Side], prompts: list[BenchPrompt], seconds: float
) -> dict[str, dict[str, list[TimedAnswer]]]:
    """Runs by task and side, one per prompt and turn. The first side's answers make the conversations. After `seconds` no further prompt
    is started."""
    end_s = time.monotonic() + seconds
    results: dict[str, dict[str, list[TimedAnswer]]] = defaultdict(lambda: defaultdict(list))
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
            answer = loaded.tokenizer.decode(
                list(runs[names[0]].token_ids), skip_special_tokens=True
            )
            turns.append(str(answer))
        print(f"{number + 1}/{len(prompts)} {prompt.task}", flush=True)
    return results


def summarise(results: dict[str, dict[str, list[TimedAnswer]]]) -> dict[str, Any]:
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
                "tokens_per_deep_pass": tokens / max(sum(r.verify_passes for r, _ in pairs), 1),
            }
    return tables


def print_tables(tables: dict[str, Any]) -> None:
    """Prints what `summarise` returned: speed-ups by task, then depths."""
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
        "\n| side | tokens/s | layer executions per token | tokens per verify pass | accepted / drafted | identical to full |"
    )
    print("|---|---|---|---|---|---|")
    for name in names:
        rows = [tables[task][name] for task in tasks]
        mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
        # `generate` reports none of these.
        depth = " | | "
        if mean["layers_per_token"]:
            depth = (
                f"{mean['layers_per_token']:.1f} | {mean['tokens_per_deep_pass']:.2f} | "
                f"{sum(r['accepted'] for r in rows)} / {sum(r['drafted'] for r in rows)}"
            )
        print(
            f"| {name} | {mean['tokens_per_s']:.1f} | {depth} | "
            f"{sum(r['identical'] for r in rows)} of {sum(r['prompts'] for r in rows)} |"
        )
