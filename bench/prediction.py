"""Predicted outputs: tokens per second of decoding, one request at a time, greedy.

An edit is a prompt, the full model's own answer to it, and a prediction: that answer with a share of its words replaced
by other words of it, left out, or doubled (a third each), tokenised anew. So the model makes the expected text again,
with edits; how faithfully a model copies is not measured. Prompts whose answers are shorter than two thirds of
--max-tokens are left out. The wrong prediction has the words of the right one in another order.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import islice

from bench.machine import described
from bench.options import add_dtypes, add_prompts, each_model, load, make_parser
from bench.prompts import first_turns
from bench.table import head, row
from shared.engine.engine import Engine
from shared.engine.request.request import Generation
from shared.ladder.folder import read_ladder

FULL, ALONE, PREDICTED, WRONG = "full", "exact", "exact, predicted", "exact, wrong prediction"
WAYS = (FULL, ALONE, PREDICTED, WRONG)


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    add_prompts(parser, per_task=0)
    add_dtypes(parser)
    parser.add_argument("--edits", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--changed", type=float, default=0.05, help="share of the words")
    parser.add_argument("--rounds", type=int, default=1, help="of which the fastest one counts")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    for options in each_model(parser):
        loaded = load(options)
        with Engine(loaded, read_ladder(options.router)) as engine:
            measured = list(islice(_measured(engine, options), options.edits))
        print(described("cpu"))
        size = sum(len(edit[FULL].token_ids) - 1 for edit in measured)
        print(f"{len(measured)} edits of {size / len(measured):.0f} tokens, {options.changed:.0%} of words changed")
        head("", "tok/s", "of full", "tokens per verify pass", "of the answer in the prediction")
        of_full = sum(edit[FULL].finished.decode_s for edit in measured)
        for way in measured[0]:
            seconds = sum(edit[way].finished.decode_s for edit in measured)
            passes = sum(edit[way].stats.num_verify_passes for edit in measured)
            right = sum(edit[way].finished.num_accepted_prediction_tokens for edit in measured)
            row(
                way,
                f"{size / seconds:.1f}",
                f"{of_full / seconds:.2f}x",
                f"{size / passes:.2f}",
                f"{right / size:.0%}" if right else "",
            )


def _measured(engine: Engine, options: argparse.Namespace) -> Iterator[dict[str, Generation]]:
    """Of each edit its fastest answer by way."""
    for number, ids in enumerate(first_turns(engine.loaded, options.prompts, options.per_task)):

        def answer(way: str, prediction: str = "", ids: list[int] = ids) -> Generation:
            policy = "full" if way == FULL else "exact"
            return engine.generate(ids, policy=policy, prediction=prediction, max_tokens=options.max_tokens)

        first = answer(FULL)
        if 3 * len(first.token_ids) < 2 * options.max_tokens:
            continue
        draw = random.Random(number)
        prediction = edited(first.text, options.changed, draw)
        words = prediction.split(" ")
        given = {PREDICTED: prediction, WRONG: " ".join(draw.sample(words, len(words)))}
        runs = {way: [first] if way == FULL else [] for way in WAYS if way in (FULL, *options.ways)}
        for place in range(options.rounds):
            for way, own in runs.items():
                if len(own) <= place:
                    own.append(answer(way, given.get(way, "")))
                assert own[-1].token_ids == first.token_ids, "exact gives the tokens of full"
        yield {way: min(own, key=lambda one: one.finished.decode_s) for way, own in runs.items()}


def edited(text: str, share: float, draw: random.Random) -> str:
    """The text with this share of its words replaced, left out or doubled."""
    words = text.split(" ")
    kept: list[str] = []
    for word in words:
        is_changed = draw.random() < share
        kept += draw.choice(([draw.choice(words)], [], [word, word])) if is_changed else [word]
    return " ".join(kept)


if __name__ == "__main__":
    main()
