"""Time to first token of prompts with a common prefix, with and without the prefix cache.

    python -m bench.prefix --model DIR [--shared 600] [--own 40] [--requests 6] [--rounds 3]

Both sides get the same prompts, first one after the other, then all at once, and take turns. Full depth, one token
each.
"""

import random
import statistics
import time
from collections import defaultdict

from bench.answers import answer_all
from bench.machine import described
from bench.options import each_model, load, make_parser
from bench.table import head, row
from shared.engine.engine import Engine
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel

COLUMNS = ("the first", "each later one", "the last of all at once")
Prompts = list[list[int]]


def prompts(vocabulary_size: int, shared: int, own: int, count: int) -> Prompts:
    """`count` prompts of random tokens (the time does not depend on them): `shared` common ones, then `own` different
    ones."""
    draw = random.Random(0)
    stem, *tails = (
        [draw.randrange(100, vocabulary_size) for _ in range(length)]
        for length in (shared, *[own] * count)
    )
    return [stem + tail for tail in tails]


def first_token_s(engine: Engine, texts: Prompts) -> list[float]:
    """Seconds to the first token of each request; all are sent at once."""
    start = time.perf_counter()
    answers = answer_all(engine, texts, DepthPolicy("full"), max_tokens=1, ignore_eos=True)
    return [answer.times_s[0] - start for answer in answers]


def measured(loaded: LoadedModel, texts: Prompts, cache_bytes: int | None) -> list[float]:
    """Seconds of each of COLUMNS. A new engine each time, so that its prefix cache is empty."""
    with Engine(loaded, prefix_cache_bytes=cache_bytes) as engine:
        engine.warm_up()
        alone = [first_token_s(engine, [text])[0] for text in texts]
    with Engine(loaded, prefix_cache_bytes=cache_bytes) as engine:
        engine.warm_up()
        together = first_token_s(engine, texts)
    return [alone[0], statistics.median(alone[1:]), max(together)]


def main() -> None:
    parser = make_parser(__doc__, many=True)
    parser.add_argument("--shared", type=int, default=600, help="tokens that all prompts have")
    parser.add_argument("--own", type=int, default=40, help="tokens of each prompt's own")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    for options in each_model(parser):
        loaded = load(options)
        texts = prompts(loaded.vocabulary_size, options.shared, options.own, options.requests)
        figures = defaultdict(list)
        for _ in range(options.rounds):
            for name, kept in (("read in full", 0), ("shared", None)):
                figures[name].append(measured(loaded, texts, kept))
        print(described("cpu"))
        head("seconds to the first token", *COLUMNS)
        for name, rounds in figures.items():
            row(name, *(f"{statistics.median(own):.2f}" for own in zip(*rounds, strict=True)))


if __name__ == "__main__":
    main()
