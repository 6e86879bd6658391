"""Tokens per second while decoding: Hugging Face's `generate`, our full depth, and `exact` with all proposers or parts
of the ladder.

    python -m bench.decode --model DIR --router FOLDER [--device cuda] [--dtype float32] [--per-task 5] [--levers]

All sides answer every prompt in turn, in an order that rotates. The decoding time runs from the first token to the
last. Batch 1, at most 64 new tokens; weights as they are stored. Greedy, or sampled with `--temperature T` by the same
seed on all sides (without `generate`). `--levers`: also `exact` with each part alone.
`--beside FOLDER ..`: also `exact` with other routers.

Formats of weights in turn: `bench.peers --ours`.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.decode_figures import EXACT, FULL, measure, print_tables, summarise
from bench.machine import described
from bench.options import add_device, add_dtypes, add_prompts, each_model, load, make_parser
from bench.prompts import PLAIN_TEXT_NOTE, read_prompts, takes_chat
from neap_engine.evaluate.sides import Side, in_process, neap
from neap_engine.evaluate.transformers_sides import GENERATE, transformers_sides
from shared.engine.engine import Engine
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel
from shared.model.own_thread import run_in_own_thread
from shared.model.sampling import SamplingParams


def levers(ladder: Ladder, vocabulary_size: int) -> dict[str, Ladder | None]:
    """Ladders that hold only a part of `ladder`, by name; None for what serves without a router."""
    no_tables = replace(ladder, lookup_confidence=None, ngrams=None, ngram_confidence=None)
    no_exits = replace(ladder, exits=(), draft_vocabulary=None)
    found: dict[str, Ladder | None] = {
        "no router": None,
        "prompt look-up": replace(no_exits, ngrams=None, ngram_confidence=None),
        "n-gram table": replace(no_exits, lookup_confidence=None),
        "both tables": no_exits,
    }
    if ladder.exits:
        found["exits at layers"] = no_tables
        found["exits, whole vocabulary"] = replace(
            no_tables, draft_vocabulary=run_in_own_thread(torch.arange, vocabulary_size)
        )
    if len(ladder.exits) > 1:
        for layer_exit in ladder.exits:
            found[f"tables and {layer_exit.name}"] = replace(ladder, exits=(layer_exit,))
    return found


def usual_sides(loaded: LoadedModel, options: argparse.Namespace, stack: ExitStack) -> dict[str, Side]:
    """Our full depth, Hugging Face, parts of the ladder, and exact, as the options name them."""
    engine = stack.enter_context(Engine(loaded, prefix_cache_bytes=0))
    engine.warm_up()
    sampling = SamplingParams(temperature=options.temperature, seed=0)
    sides = {FULL: neap(engine, DepthPolicy(FULL), None, options.max_tokens, sampling)}
    if not (options.no_hf or options.temperature):
        where = {"device": options.device}
        answer = in_process(transformers_sides, options.model, where, options.max_tokens)
        generate = stack.enter_context(answer)
        sides[GENERATE] = lambda ids: generate((GENERATE, ids, []))
    ladder = read_ladder(options.router)
    ladders: dict[str, Ladder | None] = {}
    if options.levers is not None:
        ladders = levers(ladder, loaded.vocabulary_size)
        ladders = {name: ladders[name] for name in options.levers or ladders}
    ladders[EXACT] = ladder
    ladders |= {f"{EXACT}, {folder.name}": read_ladder(folder) for folder in options.beside}
    for name, part in ladders.items():
        sides[name] = neap(engine, DepthPolicy(EXACT), part, options.max_tokens, sampling)
    return sides


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Prints the tables of one model, and returns them."""
    loaded = load(options)
    prompts = read_prompts(options.prompts, options.per_task)
    if not takes_chat(loaded):
        print(PLAIN_TEXT_NOTE)
    with ExitStack() as stack:
        tables = summarise(measure(loaded, usual_sides(loaded, options, stack), prompts))
    if not tables:
        raise SystemExit("nothing was measured")
    how = f"sampled at {options.temperature:g}" if options.temperature else "greedy"
    print(f"{described(options.device)}, computes in {loaded.compute_dtype}, {how}")
    print_tables(tables)
    return tables


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns the tables by model."""
    parser = make_parser(__doc__, router=True, many=True)
    add_device(parser)
    add_dtypes(parser)
    add_prompts(parser, 0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--levers", nargs="*", help="also exact with these parts of the ladder alone; all if none is named"
    )  # fmt: skip
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other routers")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here")
    figures = {}
    for options in each_model(parser, arguments):
        figures[options.model] = run(options)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1))
    return figures


if __name__ == "__main__":
    main()
