"""What `bench.decode` measures: answers to all prompts by all sides in turn, and the figures of each side."""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from bench.prompts import BenchPrompt, encode_turns
from bench.table import head, row
from neap_engine.evaluate.sides import Side, TimedAnswer
from shared.model.loaded import LoadedModel

FULL: Final = "full"
EXACT: Final = "exact"
MIN_TOKENS = 8
WARM_UP_PROMPT = list(range(3, 40))
# By task and side.
Results = Mapping[str, Mapping[str, list[TimedAnswer]]]


def measure(loaded: LoadedModel, sides: dict[str, Side], prompts: list[BenchPrompt]) -> Results:
    """One answer per side, prompt and turn, after an untimed one. The first side's answers make the conversations."""
    for side in sides.values():  # binds the ladder, touches memory pages
        side(WARM_UP_PROMPT)
    results: dict[str, dict[str, list[TimedAnswer]]] = defaultdict(lambda: defaultdict(list))
    assert loaded.tokenizer is not None
    names = list(sides)
    for number, prompt in enumerate(prompts):
        turns: list[str] = []
        for turn in prompt.turns:
            turns.append(turn)
            ids = encode_turns(loaded, turns)
            shift = number % len(names)
            runs = {name: sides[name](list(ids)) for name in names[shift:] + names[:shift]}
            for name, run in runs.items():
                results[prompt.task][name].append(run)
            answer = loaded.tokenizer.decode(list(runs[names[0]].token_ids), skip_special_tokens=True)
            turns.append(str(answer))
        print(f"{number + 1}/{len(prompts)} {prompt.task}", flush=True)
    return results


def summarise(results: Results) -> dict[str, Any]:
    """Figures by task and side, over prompts that full depth answered with at least MIN_TOKENS tokens. Ratios are to
    our full depth.

    `speed_up`: ratio of the mean tokens per second over prompts, Spec-Bench's measure (2401.07851). `speed_up_median`:
    median over prompts of the ratio of times per token. `speed_up_total`: ratio of the total times of whole answers,
    prefill included.
    """
    tables: dict[str, Any] = {}
    for task, sides in results.items():
        found = {name: _figures(runs, sides[FULL]) for name, runs in sides.items()}
        if all(found.values()):
            tables[task] = found
        else:
            print(f"{task}: no answer has {MIN_TOKENS} tokens; left out")
    return tables


def _figures(runs: list[TimedAnswer], full: list[TimedAnswer]) -> dict[str, float]:
    """Nothing if no answer is long enough."""
    pairs = [(r, f) for r, f in zip(runs, full, strict=True) if len(f.token_ids) >= MIN_TOKENS]
    if not pairs:
        return {}
    tokens = sum(max(len(run.token_ids) - 1, 0) for run, _ in pairs)
    rates, full_rates = ([1 / one.per_token_s for one in side] for side in zip(*pairs, strict=True))
    return {
        "speed_up": statistics.mean(rates) / statistics.mean(full_rates),
        "speed_up_median": statistics.median(f.per_token_s / r.per_token_s for r, f in pairs),
        "speed_up_total": sum(f.total_s for _, f in pairs) / sum(r.total_s for r, _ in pairs),
        "tokens_per_s": statistics.median(rates),
        "identical": sum(r.token_ids == f.token_ids for r, f in zip(runs, full, strict=True)),
        "prompts": len(runs),
        "layers_per_token": sum(r.layer_executions for r, _ in pairs) / max(tokens, 1),
        "accepted": sum(r.accepted for r, _ in pairs),
        "drafted": sum(r.drafted for r, _ in pairs),
        "tokens_per_deep_pass": tokens / max(sum(r.verify_passes for r, _ in pairs), 1),
    }


def print_tables(tables: dict[str, Any]) -> None:
    """Prints what `summarise` returned: speed-ups by task, then depths."""
    names = list(next(iter(tables.values())))
    print("\nspeed-up over full depth per task, and the means over tasks", end="")
    head("side", *tables, "mean", "of medians", "with prefill")
    for name in names:
        cells = [f"{sides[name]['speed_up']:.2f}" for sides in tables.values()]
        mean, median, total = (
            statistics.mean(sides[name][key] for sides in tables.values())
            for key in ("speed_up", "speed_up_median", "speed_up_total")
        )
        row(name, *cells, f"**{mean:.2f}**", f"{median:.2f}", f"{total:.2f}")
    head("side", "tokens/s", "layer executions per token", "tokens per verify pass", "accepted / drafted",
         "identical to full")  # fmt: skip
    for name in names:
        rows = [sides[name] for sides in tables.values()]
        mean = {key: statistics.mean(own[key] for own in rows) for key in rows[0]}
        total = {key: sum(own[key] for own in rows) for key in rows[0]}
        # `generate` reports none of these.
        depth = ["", "", ""]
        if mean["layers_per_token"]:
            depth = [f"{mean['layers_per_token']:.1f}", f"{mean['tokens_per_deep_pass']:.2f}"]
            depth.append(f"{total['accepted']} / {total['drafted']}")
        row(name, f"{mean['tokens_per_s']:.1f}", *depth, f"{total['identical']} of {total['prompts']}")
