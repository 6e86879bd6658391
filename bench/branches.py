"""What branches bring beside a trunk of drafts (docs/decisions/029): `exact` with them and without them. And what
proposers know of the first position of each chain, if every exit is asked: whose token is right there.

    python -m bench.branches --model DIR --router FOLDER [--dtype float32] [--device cuda] [--per-task 5] [--max-tokens
    64]

All sides answer every prompt in turn. Greedy, batch 1. The planner goes by measured costs. In the table of first
positions, "chosen" is the token that is most probable given what all proposers say, and "verified" are those that the
pass verified, the trunk's and those of branches.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from bench.ablation import without
from bench.decode_figures import FULL, WARM_UP_PROMPT, measure, print_tables, summarise
from bench.machine import described
from bench.options import add_device, add_dtypes, add_prompts, each_model, load, make_parser
from bench.prompts import read_prompts
from bench.table import head, row
from neap_engine.evaluate.sides import Side, TimedAnswer, neap
from shared.engine.drafting.speculation import Speculation
from shared.engine.engine import Engine
from shared.engine.step import Decoder
from shared.engine.verification import Verdict
from shared.ladder.folder import read_ladder
from shared.ladder.policy import DepthPolicy
from shared.ladder.rungs import EXIT

WITH, WITHOUT, ASKED = "exact with branches", "exact without", "every exit asked"
FIRST = ("tables right", "exit right", "chosen", "either", "verified")


@contextmanager
def first_positions(found: Counter[str]) -> Iterator[None]:
    """Counts chains and whose token was right at their first position, by the names in FIRST."""
    commit = Decoder._commit

    def counted(decoder: Decoder, part: Speculation, verdict: Verdict | None) -> None:
        if part.proposals and verdict is not None:
            said, rate = part.proposals[0], part.sequence.confidence.rate
            own = [[draft for draft in said if draft.rung.startswith(EXIT) == exits] for exits in (False, True)]
            tables, exit_, chosen = ({draft.token for draft, _ in rate(drafts)[:1]} for drafts in (*own, said))
            first = [part.drafts, *(branch.drafts for branch in part.branches if branch.place == 0)]
            verified = {draft.token for drafts in first for draft in drafts[:1]}
            tokens = zip(FIRST, (tables, exit_, chosen, tables | exit_, verified), strict=True)
            found.update(["chains", *(name for name, own in tokens if verdict.tokens[0] in own)])
        commit(decoder, part, verdict)

    with mock.patch.object(Decoder, "_commit", counted):
        yield


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

            found: Counter[str] = Counter()
            asked = neap(engine, DepthPolicy("exact"), read_ladder(options.router), options.max_tokens)

            def with_every_exit(ids: list[int], asked: Side = asked, found: Counter[str] = found) -> TimedAnswer:
                counts = Counter() if ids == WARM_UP_PROMPT else found
                with without(["exits asked if they pay"]), first_positions(counts):
                    return asked(ids)

            full = neap(engine, DepthPolicy("full"), None, options.max_tokens)
            sides = {FULL: full, WITHOUT: without_branches, WITH: exact, ASKED: with_every_exit}
            results = measure(loaded, sides, read_prompts(options.prompts, options.per_task))
        print(described(options.device))
        print_tables(summarise(results))
        head("first positions", *FIRST, "verified / either")
        shares = [found[name] / found["chains"] for name in FIRST]
        row(found["chains"], *(f"{share:.3f}" for share in (*shares, shares[-1] / shares[-2])))


if __name__ == "__main__":
    main()
