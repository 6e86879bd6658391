"""Time to first token of prompts with a common prefix, with and without the prefix cache.

    python -m bench.prefix --model DIR [--shared 600] [--own 40] [--requests 6] [--rounds 3]

Both sides get the same prompts, first one after the other and then all at once, and take turns. Full depth, float32, one token each.
"""

import random
import statistics
import time
from collections import defaultdict

from bench.machine import described
from bench.options import make_parser, parsed
from shared.engine.engine import Engine
from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.ladder.policy import DepthPolicy
from shared.model.load import load_model
from shared.model.loaded import LoadedModel


def prompts(loaded: LoadedModel, shared: int, own: int, count: int) -> list[tuple[int, ...]]:
    """`count` prompts of random tokens (the time does not depend on them): `shared` common ones, then `own` different ones."""
    draw = random.Random(0)
    stem = [draw.randrange(100, loaded.vocabulary_size) for _ in range(shared)]
    tails = [
        [draw.randrange(100, loaded.vocabulary_size) for _ in range(own)] for _ in range(count)
    ]
    return [(*stem, *tail) for tail in tails]


def first_tokens(engine: Engine, texts: list[tuple[int, ...]]) -> list[float]:
    """Seconds to the first token of each request; all are sent at once."""
    stopping = StoppingParams(max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    handles = [
        engine.submit(GenerationRequest(text, stopping=stopping, policy=DepthPolicy("full")))
        for text in texts
    ]
    seconds = []
    for handle in handles:
        next(handle.events())
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--shared", type=int, default=600, help="tokens that all prompts start with"
    )
    parser.add_argument("--own", type=int, default=40, help="tokens of each prompt's own")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    options = parsed(parser)
    loaded = load_model(options.model)
    texts = prompts(loaded, options.shared, options.own, options.requests)
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(options.rounds):
        for name, kept in (("read in full", 0), ("shared", None)):
            # A new engine each time, so that its prefix cache is empty.
            with Engine(loaded, prefix_cache_bytes=kept) as engine:
                engine.warm_up()
                alone = [first_tokens(engine, [text])[0] for text in texts]
            with Engine(loaded, prefix_cache_bytes=kept) as engine:
                engine.warm_up()
                together = first_tokens(engine, texts)
            figures[name]["first"].append(alone[0])
            figures[name]["each later one"].append(statistics.median(alone[1:]))
            figures[name]["last of all at once"].append(together[-1])
    print(described("cpu"))
    columns = list(figures["shared"])
    print("| seconds to the first token | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name, row in figures.items():
        print(
            f"| {name} | " + " | ".join(f"{statistics.median(row[c]):.2f}" for c in columns) + " |"
        )


if __name__ == "__main__":
    main()
