"""`python -m neap_engine.evaluate`: measures for `neap evaluate`, which shows the results.

Registry, data folder, device, dtype, threads and context length are settings of the worker, read from the environment.
Standard output gets one JSON object per line: {"measured", "total"} after each answer, then {"report": {"run",
"rows"}}, or {"error", "reason"}.
"""

from shared.cpus import size_thread_pools

if __name__ == "__main__":  # before anything below imports torch
    size_thread_pools()

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from inference_service.published_bounds import bounds_that_hold
from neap_engine.evaluate.figures import Answer, Row, expected_answers, is_right, row
from neap_engine.evaluate.sides import Side, in_process, neap
from neap_engine.evaluate.thinning import evenly_kept, kept_at_speed, thinned_side
from neap_engine.evaluate.transformers_sides import (
    EARLY_EXIT,
    GENERATE,
    LOOKUP,
    TIDE,
    Score,
    transformers_sides,
)
from neap_engine.measuring import describe_machine, load_subject, run_process, say
from neap_engine.tune.prompts import read_prompts
from shared.engine.engine import Engine
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.ladder.risk import PublishedRisk
from shared.model.loaded import LoadedModel

FULL: Final = "full"
EXACT: Final = "exact"
# Prompts by which the speed of exact is estimated before the number of layers to skip is chosen.
PILOT_PROMPTS = 3
OTHERS = (GENERATE, LOOKUP, EARLY_EXIT, TIDE)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process' exit status."""
    options = parse(argv)
    return run_process(lambda: run(options))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m neap_engine.evaluate", description=__doc__)
    parser.add_argument("--model", required=True, metavar="ID=SOURCE")
    parser.add_argument("--router", default="latest", help="a version number or an alias")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--margin", type=float, action="append", default=[])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> None:
    """Measures, and says the report. Raises `NeapError`."""
    policies = engine_policies(options.margin)
    subject = load_subject(options.model, options.router)
    loaded, ladder, published = subject.loaded, subject.ladder, subject.published
    if options.layers is not None and not 2 <= options.layers < loaded.num_layers:
        raise InvalidInput(
            f"--layers must be between 2 and {loaded.num_layers - 1}, because the model has {loaded.num_layers}"
        )
    prompts = read_prompts(options.prompts, loaded)
    if max(map(len, prompts)) + options.max_tokens > loaded.context_length:
        raise InvalidInput("a prompt and its answer do not fit into the context")
    notes = certified(bounds_that_hold(published.manifest, loaded).get("margin"), policies)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(loaded, ladder, prefix_cache_bytes=0))
        engine.warm_up()
        others = stack.enter_context(
            in_process(transformers_sides, subject.source, subject.load_options, options.max_tokens)
        )
        sides: dict[str, Side] = {
            name: neap(engine, policy, ladder, options.max_tokens)
            for name, policy in policies.items()
        }
        num_kept = options.layers or kept_at_speed(loaded, speed_up(sides, prompts[:PILOT_PROMPTS]))
        kept = evenly_kept(loaded.num_layers, num_kept)
        sides[f"{len(kept)} of {loaded.num_layers} layers"] = stack.enter_context(
            in_process(thinned_side, subject.source, subject.load_options, kept, options.max_tokens)
        )
        refused = others("refusals")
        sides |= {name: asking(others, name) for name in OTHERS if name not in refused}
        for side in sides.values():  # touches memory pages
            side(list(prompts[0][:8]))
        answers = measure(sides, prompts, judge(others, loaded, expected_answers(options.prompts)))
    rows = [row(name, own, answers[FULL], notes.get(name, "")) for name, own in answers.items()]
    rows += [Row(name, f"not measured: {why}") for name, why in refused.items()]
    description = {
        "model_id": loaded.model_id,
        "router_version": published.version,
        "num_prompts": len(prompts),
        "max_tokens": options.max_tokens,
        "machine": describe_machine(loaded),
    }
    say(report={"run": description, "rows": [asdict(one) for one in rows]})


def engine_policies(margins: Sequence[float]) -> dict[str, DepthPolicy]:
    """The depth policies to compare, by name. Raises `InvalidInput`."""
    relaxed = {
        f"relaxed, margin {m:g}": DepthPolicy("relaxed", margin=m) for m in sorted(set(margins))
    }
    return {FULL: DepthPolicy(FULL), EXACT: DepthPolicy(EXACT), **relaxed}


def asking(others: Callable[[Any], Any], name: str) -> Side:
    """The `Side` called `name` of `TransformersSides`."""
    return lambda ids: others((name, ids, []))


def certified(risk: PublishedRisk | None, policies: Mapping[str, DepthPolicy]) -> dict[str, str]:
    """What is certified for the margins, by side."""
    notes = {}
    for name, policy in policies.items():
        if policy.margin is not None:
            bound = risk.epsilon_at(policy.margin) if risk is not None else None
            notes[name] = f"certified: {bound:.1%} differ" if bound else "not certified"
    return notes


def speed_up(sides: Mapping[str, Side], prompts: Sequence[tuple[int, ...]]) -> float:
    """How many times as fast exact is as full."""
    runs = {name: [sides[name](list(ids)) for ids in prompts] for name in (FULL, EXACT)}
    full, exact = (
        sum(run.num_decoded for run in own) / max(sum(run.decode_s for run in own), 1e-9)
        for own in runs.values()
    )
    return max(exact / max(full, 1e-9), 1.0)


def judge(
    reference: Callable[[Any], Any], loaded: LoadedModel, expected: Sequence[str | None]
) -> Callable[[int, Sequence[int], Any], Answer]:
    """A function that judges the answer to a prompt by the full model and by what is expected."""
    scores: dict[tuple[int, tuple[int, ...]], Score] = {}

    def judged(number: int, prompt: Sequence[int], run: Any) -> Answer:
        key = number, run.token_ids
        if key not in scores:
            scores[key] = reference(("score", list(prompt), list(run.token_ids)))
        text = ""
        if loaded.tokenizer is not None:
            text = str(loaded.tokenizer.decode(list(run.token_ids), skip_special_tokens=True))
        return Answer(run, scores[key], is_right(text, expected[number]))

    return judged


def measure(
    sides: Mapping[str, Side],
    prompts: Sequence[tuple[int, ...]],
    judged: Callable[[int, Sequence[int], Any], Answer],
) -> dict[str, list[Answer]]:
    """All sides take turns on a prompt, in an order that rotates, so that what disturbs the machine meets all of
    them."""
    names = list(sides)
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    for number, prompt in enumerate(prompts):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            answers[name].append(judged(number, prompt, sides[name](list(prompt))))
            say(measured=sum(map(len, answers.values())), total=len(names) * len(prompts))
    return answers


if __name__ == "__main__":
    sys.exit(main())
