"""What branches bring beside a trunk of drafts (docs/decisions/029): `exact` with them and without them.

    python -m bench.branches --model DIR --router FOLDER [--dtype float32] [--device cuda] [--per-task 5] [--max-tokens
    64]

All sides answer every prompt in turn. Greedy, batch 1. The planner goes by measured costs.
"""

from bench.ablation import without
from bench.decode_figures import FULL, measure, print_tables, summarise
from bench.machine import described
from bench.options import add_device, add_dtypes, add_prompts, each_model, load, make_parser
from bench.prompts import read_prompts
from neap_engine.evaluate.sides import Side, TimedAnswer, neap
from shared.engine.engine import Engine
from shared.ladder.folder import read_ladder
from shared.ladder.policy import DepthPolicy

WITH, WITHOUT = "exact with branches", "exact without"


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_device(parser)
    add_prompts(parser, 5)
    add_dtypes(parser)
    parser.add_argument("--max-tokens", type=int, default=64)
    for options in each_model(parser):
        loaded, ladder = load(options), read_ladder(options.router)
        with Engine(loaded, prefix_cache_bytes=0) as engine:
            if not engine.runner.supports_ragged:
                parser.error(f"this model has no branches: it runs {engine.runner.description}")
            exact = neap(engine, DepthPolicy("exact"), ladder, options.max_tokens)

            def without_branches(ids: list[int], exact: Side = exact) -> TimedAnswer:
                with without(["branches"]):
                    return exact(ids)

            full = neap(engine, DepthPolicy("full"), None, options.max_tokens)
            sides = {FULL: full, WITHOUT: without_branches, WITH: exact}
            results = measure(loaded, sides, read_prompts(options.prompts, options.per_task))
        print(described(options.device))
        print_tables(summarise(results))


if __name__ == "__main__":
    main()
