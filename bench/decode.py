"""Tokens per second while decoding: Hugging Face's `generate`, our full depth, and `exact` with all rungs or parts of the ladder.

    python -m bench.decode --model DIR --router FOLDER [--device cuda] [--per-task 5] [--levers]
    python -m bench.decode --model DIR --router FOLDER --formats float32 bfloat16 Q8_0 [--per-task 5]

All sides answer every prompt in turn, in an order that rotates. The decoding time runs from the first token to the last. Greedy,
batch 1, at most 64 new tokens; weights as they are stored. `--levers`: also `exact` with each part alone. `--beside FOLDER ..`: also
`exact` with other routers.

`--formats`, on a CPU: full depth and `exact` with the weights in each format, each format in a process of its own, and all in one run.
The router serves all formats, although it was made for one: a format that changes the model makes its drafts worse, not its answers.
"""

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from bench.decode_figures import EXACT, FULL, MAX_LADDERS, measure, print_tables, summarise
from bench.decode_formats import print_formats, sides_by_format, tables_by_format
from bench.forms import add_formats, forms
from bench.hugging_face import HF, hugging_face
from bench.machine import described
from bench.options import add_device, add_prompts, make_parser, parsed
from bench.prompts import PLAIN_TEXT_NOTE, read_prompts, takes_chat
from neap_engine.evaluate.sides import Side, neap
from shared.engine.engine import Engine
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.own_thread import run_in_own_thread


def levers(ladder: Ladder, vocabulary_size: int) -> dict[str, Ladder]:
    """Ladders that hold only a part of `ladder`, by name."""
    no_tables = replace(ladder, lookup_confidence=None, ngrams=None, ngram_confidence=None)
    no_exits = replace(ladder, exits=(), draft_vocabulary=None)
    found = {
        "suffix lookup": replace(no_exits, ngrams=None, ngram_confidence=None),
        "successor table": replace(no_exits, lookup_confidence=None),
        "both tables": no_exits,
    }
    if ladder.exits:
        found["exits at layers"] = no_tables
        found["exits, whole vocabulary"] = replace(
            no_tables, draft_vocabulary=run_in_own_thread(torch.arange, vocabulary_size)
        )
    return found


@contextmanager
def usual_sides(loaded: LoadedModel, options: argparse.Namespace) -> Iterator[dict[str, Side]]:
    """Our full depth, Hugging Face, parts of the ladder, and exact, as the options name them."""
    ladder = read_ladder(options.router)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(loaded, prefix_cache_bytes=0, max_ladders=MAX_LADDERS))
        engine.warm_up()
        full, exact = DepthPolicy(FULL), DepthPolicy(EXACT)
        sides: dict[str, Side] = {FULL: neap(engine, full, None, options.max_tokens)}
        if not options.no_hf:
            sides[HF] = stack.enter_context(
                hugging_face(options.model, options.max_tokens, options.device)
            )
        if options.levers is not None:
            for name, part in levers(ladder, loaded.vocabulary_size).items():
                if name in options.levers or not options.levers:
                    sides[name] = neap(engine, exact, part, options.max_tokens)
        sides[EXACT] = neap(engine, exact, ladder, options.max_tokens)
        for folder in options.beside:
            sides[f"{EXACT}, {folder.name}"] = neap(
                engine, exact, read_ladder(folder), options.max_tokens
            )
        yield sides


def main() -> None:
    parser = make_parser(__doc__, router=True)
    add_device(parser)
    add_formats(parser)
    add_prompts(parser, 0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--levers",
        nargs="*",
        help="also exact with these parts of the ladder alone; all parts if none is named",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="after this time no further prompt is started",
    )
    parser.add_argument(
        "--beside", type=Path, nargs="*", default=[], help="folders of other routers"
    )
    parser.add_argument("--no-hf", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parsed(parser)
    if options.formats and (options.device != "cpu" or options.levers is not None):
        parser.error("--formats compares full and exact on a CPU, without --levers")
    loaded = load_model(options.model, device=options.device)
    prompts = read_prompts(options.prompts, options.per_task)
    if not takes_chat(loaded):
        print(PLAIN_TEXT_NOTE)
    with ExitStack() as stack:
        if options.formats:
            chosen = forms(options)
            sides = stack.enter_context(sides_by_format(chosen, options.router, options.max_tokens))
        else:
            sides = stack.enter_context(usual_sides(loaded, options))
        for side in sides.values():  # warm-up: binds the ladder, touches memory pages
            side(list(range(3, 40)))
        results = measure(loaded, sides, prompts, options.seconds)
    print(f"{described(options.device)}, computes in {loaded.model.dtype}")
    tables = tables_by_format(results, options.formats) if options.formats else summarise(results)
    if not tables:
        parser.exit(1, "nothing was measured\n")
    (print_formats if options.formats else print_tables)(tables)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
