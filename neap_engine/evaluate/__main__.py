"""`python -m neap_engine.evaluate`: measures for `neap evaluate` and `neap tune`, which show the results.

Registry, data folder, device, dtype, threads and context length are settings of the worker, read from the environment.
Standard output gets one JSON object per line: {"measured", "total"} after each answer, then {"report": {"run",
"rows"}}, or {"error", "reason"}.
"""

from shared.cpus import size_thread_pools
from shared.light_imports import import_transformers_lightly

if __name__ == "__main__":  # before anything below imports torch
    size_thread_pools()
    import_transformers_lightly()

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from neap_engine.evaluate.answers_file import AnswersFile, Key
from neap_engine.evaluate.figures import UNSCORED, Row, ScoredAnswer, expected_answers, is_right, row
from neap_engine.evaluate.prompts import read_prompts
from neap_engine.evaluate.sides import (
    Side,
    Subject,
    TimedAnswer,
    describe_machine,
    in_process,
    load_subject,
    neap,
    run_process,
    say,
)
from neap_engine.evaluate.transformers_sides import EARLY_EXIT, GENERATE, LOOKUP, TIDE, Score, transformers_sides
from shared.engine.engine import Engine
from shared.errors import InvalidInput
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel

FULL: Final = "full"
EXACT: Final = "exact"
# Each side first answers the beginning of a prompt, because that touches memory pages.
WARM_UP_TOKENS = 8
OTHERS = (GENERATE, LOOKUP, EARLY_EXIT, TIDE)

Prompts = Sequence[tuple[int, ...]]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process' exit status."""
    options = parse(argv)
    return run_process(lambda: run(options))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m neap_engine.evaluate", description=__doc__)
    parser.add_argument("--model", required=True, metavar="ID=SOURCE")
    parser.add_argument("--router", default="latest", help="a version number or an alias")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--threshold", type=float, action="append", default=[])
    parser.add_argument("--margin", type=float, action="append", default=[])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1, help="each side answers each prompt so many times")
    parser.add_argument(
        "--results",
        type=Path,
        help="measure the depth policies alone; keep all answers in this file, and continue from it",
    )
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Others:
    """Sides other than neap's; `score`, which says what the full model thinks of (prompt, answer); and why sides are
    missing, by name."""

    sides: Mapping[str, Side] = field(default_factory=dict)
    score: Callable[[list[int], list[int]], Score] = lambda prompt, answer: UNSCORED
    refused: Mapping[str, str] = field(default_factory=dict)


def run(options: argparse.Namespace) -> None:
    """Measures, and says the report. Raises `NeapError`."""
    policies = engine_policies(options.threshold, options.margin)
    subject = load_subject(options.model, options.router)
    prompts = read_prompts(options.prompts, subject.loaded)
    description = described(subject, prompts, options.max_tokens)
    answers: MutableMapping[Key, TimedAnswer] = {}
    if options.results is not None:
        answers = AnswersFile(options.results, description)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(subject.loaded, subject.ladder))
        engine.warm_up()

        def engine_sides(max_tokens: int) -> dict[str, Side]:
            return {name: neap(engine, policy, subject.ladder, max_tokens) for name, policy in policies.items()}

        neap_sides, others = engine_sides(options.max_tokens), Others()
        if options.results is None:
            others = other_sides(stack, subject, prompts, options.max_tokens)
        sides = {**neap_sides, **others.sides}
        measure(sides, {**engine_sides(WARM_UP_TOKENS), **others.sides}, prompts, answers, options.rounds)
        judged = judge(others.score, subject.loaded, expected_answers(options.prompts))
        by_side = {
            name: [
                judged(
                    number, ids, undisturbed(answers, name, range(number, options.rounds * len(prompts), len(prompts)))
                )
                for number, ids in enumerate(prompts)
            ]
            for name in sides
        }
    rows = [row(name, of_side, by_side[FULL]) for name, of_side in by_side.items()]
    rows += [Row(name, f"not measured: {why}") for name, why in others.refused.items()]
    say(report={"run": description, "rows": [asdict(entry) for entry in rows]})


def engine_policies(thresholds: Sequence[float], margins: Sequence[float]) -> dict[str, DepthPolicy]:
    """The depth policies to compare, by name: relaxed at each threshold and at each margin, the safest first.
    Raises `InvalidInput`."""
    relaxed = {f"relaxed {t:g}": DepthPolicy("relaxed", threshold=t) for t in sorted(set(thresholds), reverse=True)}
    relaxed |= {f"relaxed, margin {m:g}": DepthPolicy("relaxed", margin=m) for m in sorted(set(margins))}
    return {FULL: DepthPolicy(FULL), EXACT: DepthPolicy(EXACT), **relaxed}


def described(subject: Subject, prompts: Prompts, max_tokens: int) -> dict[str, Any]:
    """What answers depend on."""
    return {
        "model_id": subject.loaded.model_id,
        "fingerprint": subject.loaded.fingerprint,
        "router_version": subject.published.version,
        "router_digest": subject.published.manifest_digest,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
        "machine": describe_machine(subject.loaded),
    }


def other_sides(stack: ExitStack, subject: Subject, prompts: Prompts, max_tokens: int) -> Others:
    """Starts the process of the other sides, which ends with `stack`. Raises `InvalidInput`."""
    if max(map(len, prompts)) + max_tokens > subject.loaded.context_length:
        raise InvalidInput("a prompt and its answer do not fit into the context")
    others = stack.enter_context(in_process(transformers_sides, subject.source, subject.load_options, max_tokens))
    refused = others("refusals")
    sides = {name: asking(others, name) for name in OTHERS if name not in refused}
    return Others(sides, lambda prompt, answer: others(("score", prompt, answer)), refused)


def asking(others: Callable[[Any], Any], name: str) -> Side:
    """The `Side` called `name` of `TransformersSides`."""
    return lambda ids: others((name, ids, []))


def measure(
    sides: Mapping[str, Side],
    warm_up: Mapping[str, Side],
    prompts: Prompts,
    answers: MutableMapping[Key, TimedAnswer],
    rounds: int,
) -> None:
    """Adds what is missing to `answers`, whose numbers go on from round to round. All sides take turns on a prompt, in
    an order that rotates, so that what disturbs the machine meets all of them. The sides of `warm_up` answer before."""
    names = list(sides)
    shifted = [(number, (number + number // len(prompts)) % len(names)) for number in range(rounds * len(prompts))]
    order = [(number, name) for number, by in shifted for name in names[by:] + names[:by]]
    missing = [key for key in order if key not in answers]
    for side in warm_up.values() if missing else ():
        side(list(prompts[0][:8]))
    for left, (number, name) in zip(range(len(missing) - 1, -1, -1), missing, strict=True):
        answers[number, name] = sides[name](list(prompts[number % len(prompts)]))
        say(measured=len(order) - left, total=len(order))


def undisturbed(answers: Mapping[Key, TimedAnswer], side: str, numbers: Iterable[int]) -> TimedAnswer:
    """The fastest of a side's answers of these numbers, all to one prompt: what else the machine does only adds to its
    time."""
    return min((answers[number, side] for number in numbers), key=lambda run: run.per_token_s)


def judge(
    score: Callable[[list[int], list[int]], Score], loaded: LoadedModel, expected: Sequence[str | None]
) -> Callable[[int, Sequence[int], TimedAnswer], ScoredAnswer]:
    """A function that judges the answer to a prompt by the full model and by what is expected."""
    scores: dict[tuple[int, tuple[int, ...]], Score] = {}

    def judged(number: int, prompt: Sequence[int], run: TimedAnswer) -> ScoredAnswer:
        key = number, run.token_ids
        if key not in scores:
            scores[key] = score(list(prompt), list(run.token_ids))
        text = ""
        if loaded.tokenizer is not None:
            text = str(loaded.tokenizer.decode(list(run.token_ids), skip_special_tokens=True))
        return ScoredAnswer(run, scores[key], is_right(text, expected[number]))

    return judged


if __name__ == "__main__":
    sys.exit(main())
