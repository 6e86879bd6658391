"""Counts the prompts on which `relaxed` differs from `full`, and compares the count with the router's certified bound.

    python -m bench.relaxed --model DIR --router FOLDER [--thresholds 0.99 0.95] [--per-task 6] [--drawn 40]

Prompts are Spec-Bench's first turns, and `--drawn` prompts drawn as the calibration draws its own, with another seed. Greedy, four
requests at a time.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from bench.options import make_parser, parsed
from bench.prompts import DEFAULT_FILE, first_turns
from calibrator_service.calibration.report.certificate import binomial_cdf
from calibrator_service.calibration.text.engine_writer import EngineWriter
from calibrator_service.calibration.text.risk_answers import Limits, RiskAnswerGenerator
from calibrator_service.calibration.text.self_generation import SelfGenerationConfig
from calibrator_service.calibration.text.writer import Pace
from shared.engine.engine import Engine
from shared.ladder.folder import read_ladder
from shared.ladder.policy import DepthPolicy
from shared.ladder.risk import PublishedRisk
from shared.model.load import load_model
from shared.model.loaded import LoadedModel
from shared.model.own_thread import run_in_own_thread

DRAWN_SEED = 1_000_003
# Requests sent at once.
AT_ONCE = 4

Ids = tuple[int, ...]


def drawn(loaded: LoadedModel, count: int, num_tokens: int) -> list[Ids]:
    """Prompts from the distribution that the bound is certified for. A calibration with another seed saw none of them, except by
    chance."""
    config = SelfGenerationConfig(seed=DRAWN_SEED, max_new_tokens=num_tokens)
    writer = EngineWriter(loaded, 64)
    with tempfile.TemporaryDirectory() as folder, closing(writer):
        generator = RiskAnswerGenerator(loaded, config, Path(folder), lambda _: False)
        answers = generator.answers(Limits(count, 64, float("inf")), writer, Pace())
    return [answer.prompt for answer in answers]


def differing(
    engine: Engine, prompts: Sequence[Ids], thresholds: Sequence[float], num_tokens: int
) -> dict[float, int]:
    """Number of prompts on which the answer under `relaxed` differs from the one under `full`, by threshold."""

    def answers(policy: DepthPolicy) -> list[Ids]:
        def answer(prompt: Ids) -> Ids:
            return engine.generate(prompt, policy=policy, max_tokens=num_tokens).token_ids

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(answer, prompts))

    full = answers(DepthPolicy("full"))
    return {
        threshold: sum(
            said != expected
            for said, expected in zip(
                answers(DepthPolicy("relaxed", threshold=threshold)), full, strict=True
            )
        )
        for threshold in thresholds
    }


def main() -> None:
    parser = make_parser(__doc__, router=True)
    parser.add_argument("--thresholds", type=float, nargs="*", help="default: the certified ones")
    parser.add_argument("--per-task", type=int, default=6, help="of Spec-Bench; 0: none")
    parser.add_argument("--drawn", type=int, default=0)
    options = parsed(parser)
    manifest = json.loads((options.router / "manifest.json").read_text())
    risk = PublishedRisk.of(manifest)
    if risk is None:
        parser.error("the router publishes no bound")
    thresholds = options.thresholds or [bound.value for bound in risk.bounds]
    num_tokens = risk.num_tokens or 128
    loaded = load_model(options.model)
    sources: dict[str, list[Ids]] = {}
    if options.per_task:
        turns = first_turns(loaded, DEFAULT_FILE, options.per_task)
        sources["Spec-Bench"] = [tuple(ids) for ids in turns]
    if options.drawn:
        sources["drawn"] = run_in_own_thread(drawn, loaded, options.drawn, num_tokens)
    print(
        "| prompts | threshold | certified: differs on at most | differs on | P[so many or more] |"
    )
    print("|---|---|---|---|---|")
    with Engine(loaded, read_ladder(options.router)) as engine:
        engine.warm_up()
        for name, prompts in sources.items():
            start_s = time.perf_counter()
            for threshold, count in differing(engine, prompts, thresholds, num_tokens).items():
                bound = risk.epsilon_at(threshold)
                share, chance = "nothing certified", ""
                if bound is not None:
                    share = f"{bound:.1%}"
                    chance = f"{1 - binomial_cdf(count - 1, len(prompts), bound):.3f}"
                print(
                    f"| {name} | {threshold:g} | {share} | {count} of {len(prompts)} | {chance} |"
                )
            print(f"\n{name}: {time.perf_counter() - start_s:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
