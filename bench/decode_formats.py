"""`bench.decode --formats`: full depth and exact with one model's weights in several formats, in one run."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.decode_figures import EXACT, FULL, summarise
from bench.forms import Form
from bench.options import silence_transformers
from neap_engine.evaluate.sides import Side, TimedAnswer, in_process, neap
from shared.engine.engine import Engine
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import ModelIdentity
from shared.ladder.policy import DepthPolicy

Results = Mapping[str, Mapping[str, list[TimedAnswer]]]
# Full depth in the first format, with which all formats are compared.
FIRST = "first"


def answers_in(
    form: Form, router: Path, max_tokens: int
) -> Callable[[tuple[str, list[int]]], TimedAnswer]:
    """Loads a form of the model. The function that is returned answers (FULL or EXACT, prompt)."""
    silence_transformers()
    loaded = form.load()
    engine = Engine(loaded, prefix_cache_bytes=0)
    engine.warm_up()
    ladder = replace(read_ladder(router), model=ModelIdentity.of(loaded))
    sides = {
        FULL: neap(engine, DepthPolicy(FULL), None, max_tokens),
        EXACT: neap(engine, DepthPolicy(EXACT), ladder, max_tokens),
    }
    return lambda task: sides[task[0]](task[1])


@contextmanager
def sides_by_format(chosen: list[Form], router: Path, max_tokens: int) -> Iterator[dict[str, Side]]:
    """Full depth and exact in each form, as "FORMAT full" and "FORMAT exact"."""
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for form in chosen:
            run = stack.enter_context(in_process(answers_in, form, router, max_tokens))
            for policy in (FULL, EXACT):
                sides[f"{form.weights} {policy}"] = partial(_ask, run, policy)
        yield sides


def _ask(run: Callable[[Any], Any], policy: str, ids: list[int]) -> TimedAnswer:
    answer: TimedAnswer = run((policy, ids))
    return answer


def tables_by_format(results: Results, titles: Sequence[str]) -> dict[str, Any]:
    """The figures of `summarise` per format, for its sides FULL, EXACT and FIRST. Formats without long answers are left out."""
    found = {}
    for title in titles:
        sides = {FULL: f"{title} {FULL}", EXACT: f"{title} {EXACT}", FIRST: f"{titles[0]} {FULL}"}
        own = {
            task: {key: runs[name] for key, name in sides.items()} for task, runs in results.items()
        }
        if tables := summarise(own):
            found[title] = tables
    return found


def print_formats(by_format: Mapping[str, Any]) -> None:
    """One line per format: means over tasks, of the same turns."""
    first = next(iter(by_format))
    print(
        f"\n| format | full, tokens/s | exact, tokens/s | exact / full | full / {first} full | tokens per verify pass "
        f"| exact identical to full | full identical to {first} |"
    )
    print("|---" * 8 + "|")
    for title, tables in by_format.items():
        full, exact, other = (
            [task[side] for task in tables.values()] for side in (FULL, EXACT, FIRST)
        )
        cells = [
            title,
            f"{_mean(full, 'tokens_per_s'):.1f}",
            f"{_mean(exact, 'tokens_per_s'):.1f}",
            f"{_mean(exact, 'speed_up'):.2f}",
            f"{1 / _mean(other, 'speed_up'):.2f}",
            f"{_mean(exact, 'tokens_per_deep_pass'):.2f}",
        ]
        cells += [
            f"{_total(side, 'identical')} of {_total(side, 'prompts')}" for side in (exact, other)
        ]
        print(f"| {' | '.join(cells)} |")


def _mean(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.mean(row[key] for row in rows)


def _total(rows: Sequence[Mapping[str, int]], key: str) -> int:
    return sum(row[key] for row in rows)
