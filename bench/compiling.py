"""Whether compiling grammars delays running streams (docs/decisions/048): their gaps beside new schemas and without.

    python -m bench.compiling --model FILE --router FOLDER [--streams 4] [--per-minute 100] [--seconds 30]

Streams answer Spec-Bench prompts without end, under `exact`, while other requests of two tokens come at even intervals:
none of them, without a constraint, or each under a schema that was never seen before, so that it is compiled beside the
streams. What the second does to the streams is the price of a request, and the third beside it that of compiling.
"""

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.constraints import FILE
from bench.machine import described
from bench.options import add_dtypes, add_prompts, each_model, load, make_parser
from bench.prompts import encode_turns, first_turns
from bench.streams import Stream, percentile
from bench.table import head, row
from shared.constraints.constraint import Constraint
from shared.engine.engine import Engine
from shared.engine.request.request import TokenChunk
from shared.ladder.folder import read_ladder

SIDES = ("no other requests", "requests without a schema", "requests with a new schema")


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_prompts(parser, per_task=1)
    add_dtypes(parser)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--per-minute", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each side")
    for options in each_model(parser):
        loaded = load(options)
        prompts = first_turns(loaded, options.prompts, options.per_task)[: options.streams]
        records = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
        others = [(encode_turns(loaded, [own["prompt"]]), own["schema"]) for own in records]
        schemas = new_schemas([schema for _, schema in others])
        with Engine(loaded, read_ladder(options.router)) as engine:
            engine.warm_up()
            print(described("cpu"))
            head("", "requests", "ms to submit one", "gaps", "ms between tokens: p50", "p99", "most")
            for side in SIDES:
                ask = partial(submitted, engine, others, schemas if side == SIDES[2] else None)
                every_s = None if side == SIDES[0] else 60 / options.per_minute
                with running(engine, prompts) as streams:
                    submitted_s = asked(ask, every_s, options.seconds)
                gaps = [gap for stream in streams for gap in stream.gaps_s()]
                row(
                    side,
                    len(submitted_s),
                    f"{1e3 * percentile(submitted_s, 50):.1f}" if submitted_s else "",
                    len(gaps),
                    *(f"{1e3 * percentile(gaps, percent):.1f}" for percent in (50, 99, 100)),
                )


def submitted(
    engine: Engine, others: list[tuple[list[int], dict[str, Any]]], schemas: Iterator[str] | None, number: int
) -> None:
    constraint = Constraint(json_schema=next(schemas)) if schemas else None
    ids, _ = others[number % len(others)]
    engine.submit(ids, policy="exact", constraint=constraint, max_tokens=2)


def new_schemas(schemas: list[dict[str, Any]]) -> Iterator[str]:
    """These schemas again and again, with names of properties that no other has."""
    for number in itertools.count():
        text = json.dumps(schemas[number % len(schemas)])
        for name in set(re.findall(r'"properties": \{"(\w+)"', text)):
            text = text.replace(f'"{name}"', f'"{name}_{number}"')
        yield text


@contextmanager
def running(engine: Engine, prompts: Sequence[list[int]]) -> Iterator[list[Stream]]:
    """Yields streams that have begun. They end with the block; what they deliver is timed on the engine's thread."""
    streams = [Stream(0.0) for _ in prompts]
    begun = [threading.Event() for _ in prompts]

    def noted(number: int, event: object) -> None:
        if isinstance(event, TokenChunk) and event.tokens:
            streams[number].deliver(len(event.tokens))
            begun[number].set()

    handles = [
        engine.submit(ids, policy="exact", ignore_eos=True, max_tokens=4000, on_event=partial(noted, number))
        for number, ids in enumerate(prompts)
    ]
    for event in begun:
        event.wait()
    for stream in streams:  # prompts are not measured
        stream.deliveries.clear()
    yield streams
    assert not any(handle.is_cancelled for handle in handles)
    for handle in handles:
        handle.cancel()


def asked(ask: Callable[[int], None], every_s: float | None, seconds: float) -> list[float]:
    """Asks every so often for this long. Returns the seconds that each request took to be taken."""
    start = time.perf_counter()
    taken_s: list[float] = []
    for number in itertools.count():
        time.sleep(max(start + min(number * (every_s or seconds), seconds) - time.perf_counter(), 0))
        before = time.perf_counter()
        if before - start >= seconds:
            return taken_s
        if every_s is not None:
            ask(number)
            taken_s.append(time.perf_counter() - before)
    raise AssertionError


if __name__ == "__main__":
    main()
