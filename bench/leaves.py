"""What leaves bring beside chains of drafts (docs/decisions/029): `exact` with them and without them, over paged KV.

    python -m bench.leaves --model DIR --router FOLDER [--device cuda] [--per-task 5] [--max-tokens 64]

All sides answer every prompt in turn. On a GPU the planner goes by measured costs, and the times count. On a CPU only the numbers of
tokens and passes say something: the planner assumes that passes over up to 16 tokens take the same time, as on a GPU, and the engine
always drafts. Greedy, batch 1.
"""

from collections.abc import Callable, Generator
from typing import Any

from bench.decode_figures import FULL, measure
from bench.machine import described
from bench.options import add_device, add_prompts, make_parser, parsed
from bench.prompts import read_prompts
from inference_service.evaluate.sides import Run, Side, neap
from shared.engine.drafting.adaptive import AdaptiveDrafting
from shared.engine.drafting.costs import MAX_PASS_TOKENS, CostMeter
from shared.engine.drafting.planner import MAX_TREE_TOKENS, ExitCost, PassCosts
from shared.engine.engine import Engine
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import BoundLadder
from shared.ladder.policy import DepthPolicy
from shared.ladder.rungs import Draft
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.paged_runner import PagedRunner
from shared.model.recorder import NoRecorder
from shared.model.runner import Runner

WITH, WITHOUT = "exact with leaves", "exact without"
KV_BYTES = 1 << 28
# Shares of a pass that a call for drafts is assumed to take, on a CPU.
ALONE, EACH_MORE = 0.1, 0.01


class FlatCosts(CostMeter):
    """A GPU's costs in units of a pass: up to MAX_TREE_TOKENS tokens take the same time, and twice as many take twice as long."""

    def measure_passes(
        self, runner: Runner, *, between: Callable[[], None] = lambda: None
    ) -> PassCosts:
        wide = (MAX_TREE_TOKENS, 1.0), (2 * MAX_TREE_TOKENS, 2.0)
        return PassCosts((1.0,) * MAX_PASS_TOKENS, wide=wide)

    def measure_exits(
        self, runner: Runner, ladder: BoundLadder
    ) -> Generator[list[Draft], None, tuple[ExitCost, ...]]:
        yield from ()
        return (ExitCost(ALONE, EACH_MORE),) * len(ladder.depths)


def engine_of(loaded: LoadedModel) -> Engine:
    if loaded.device.type == "cuda":
        return Engine(loaded, prefix_cache_bytes=0)

    def paged(loaded: LoadedModel, kv_budget_bytes: int) -> Runner:
        return PagedRunner(loaded, kv_budget_bytes=kv_budget_bytes, recorder=NoRecorder())

    AdaptiveDrafting.choose = lambda self, shape: True  # type: ignore[method-assign]  # times say nothing here
    costs: Any = FlatCosts()
    return Engine(
        loaded, kv_budget_bytes=KV_BYTES, prefix_cache_bytes=0, runner_of=paged, cost_meter=costs
    )


def main() -> None:
    parser = make_parser(__doc__, router=True)
    add_device(parser)
    add_prompts(parser, 5)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parsed(parser)
    loaded = load_model(options.model, device=options.device, accelerate=options.device != "cpu")
    ladder = read_ladder(options.router)
    with engine_of(loaded) as engine:
        if not engine.runner.supports_leaves:
            parser.error(f"this model has no leaves: it runs {engine.runner.description}")
        full = neap(engine, DepthPolicy("full"), None, options.max_tokens)
        exact = neap(engine, DepthPolicy("exact"), ladder, options.max_tokens)

        def side(supports_leaves: bool) -> Side:
            def run(ids: list[int]) -> Run:
                engine.runner.supports_leaves = supports_leaves  # type: ignore[misc]
                return exact(ids)

            return run

        sides = {FULL: full, WITHOUT: side(False), WITH: side(True)}
        for own in sides.values():
            own(list(range(3, 40)))
        results = measure(loaded, sides, read_prompts(options.prompts, options.per_task), 1e9)
    print(described(options.device))
    print("\n| side | tokens per deep pass | accepted / drafted | tokens/s | identical to full |")
    print("|---|---|---|---|---|")
    for name in sides:
        runs = [run for task in results.values() for run in task[name]]
        expected = [run.token_ids for task in results.values() for run in task[FULL]]
        tokens, passes = sum(r.num_decoded for r in runs), sum(r.deep_passes for r in runs)
        speed = f"{tokens / sum(r.decode_s for r in runs):.1f}" if options.device == "cuda" else ""
        print(
            f"| {name} | {tokens / max(passes, 1):.2f} | "
            f"{sum(r.accepted for r in runs)} / {sum(r.drafted for r in runs)} | {speed} | "
            f"{sum(r.token_ids == own for r, own in zip(runs, expected, strict=True))} of {len(runs)} |"
        )


if __name__ == "__main__":
    main()
