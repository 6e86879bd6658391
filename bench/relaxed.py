"""Counts the prompts on which `relaxed` differs from `full`, and compares the count with the router's certified bound.

    python -m bench.relaxed --model DIR --router FOLDER [--thresholds 0.99 0.95] [--per-task 6] [--drawn 40]

Prompts are Spec-Bench's first turns, and `--drawn` prompts drawn as the calibration draws its own, with another seed.
Greedy, four requests at a time.
"""

import argparse
import json
import tempfile
from contextlib import closing
from pathlib import Path

from bench.batch import closed_loop
from bench.options import each_model, load, make_parser
from bench.prompts import DEFAULT_FILE, first_turns
from bench.table import head, row
from calibrator_service.calibration.report.certificate import binomial_cdf
from calibrator_service.calibration.text.engine_writer import EngineWriter
from calibrator_service.calibration.text.risk_answers import Limits, RiskAnswerGenerator
from calibrator_service.calibration.text.self_generation import SelfGenerationConfig
from calibrator_service.calibration.text.writer import Pace
from shared.engine.engine import Engine
from shared.ladder.folder import read_ladder
from shared.ladder.policy import DepthPolicy
from shared.ladder.risk import PublishedRisk
from shared.model.loaded import LoadedModel
from shared.model.own_thread import run_in_own_thread

DRAWN_SEED = 1_000_003
# Requests sent at once.
AT_ONCE = 4


def drawn(loaded: LoadedModel, count: int, num_tokens: int) -> list[list[int]]:
    """Prompts from the distribution that the bound is certified for. A calibration with another seed saw none of them,
    except by chance."""
    config = SelfGenerationConfig(seed=DRAWN_SEED, max_new_tokens=num_tokens)
    writer = EngineWriter(loaded, 64)
    with tempfile.TemporaryDirectory() as folder, closing(writer):
        generator = RiskAnswerGenerator(loaded, config, Path(folder), lambda _: False)
        answers = generator.answers(Limits(count, 64, float("inf")), writer, Pace())
    return [list(answer.prompt) for answer in answers]


def main() -> None:
    parser = make_parser(__doc__, router=True, many=True)
    parser.add_argument("--thresholds", type=float, nargs="*", help="default: the certified ones")
    parser.add_argument("--per-task", type=int, default=6, help="of Spec-Bench; 0: none")
    parser.add_argument("--drawn", type=int, default=0)
    for options in each_model(parser):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Prints the table of one model."""
    risk = PublishedRisk.of(json.loads((options.router / "manifest.json").read_text()))
    if risk is None:
        raise SystemExit("the router publishes no bound")
    num_tokens = risk.num_tokens or 128
    loaded, ladder = load(options), read_ladder(options.router)
    sources: dict[str, list[list[int]]] = {}
    if options.per_task:
        sources["Spec-Bench"] = first_turns(loaded, DEFAULT_FILE, options.per_task)
    if options.drawn:
        sources["drawn"] = run_in_own_thread(drawn, loaded, options.drawn, num_tokens)
    head("prompts", "threshold", "certified: differs on at most", "differs on", "P[so many or more]")  # fmt: skip
    with Engine(loaded) as engine:
        engine.warm_up()
        for name, prompts in sources.items():
            _, full = closed_loop(engine, "full", None, prompts, AT_ONCE, num_tokens)
            for threshold in options.thresholds or [bound.value for bound in risk.bounds]:
                policy = DepthPolicy("relaxed", threshold=threshold)
                _, said = closed_loop(engine, policy, ladder, prompts, AT_ONCE, num_tokens)
                count = sum(one != other for one, other in zip(said, full, strict=True))
                bound = risk.epsilon_at(threshold)
                share, chance = "nothing certified", ""
                if bound is not None:
                    share = f"{bound:.1%}"
                    chance = f"{1 - binomial_cdf(count - 1, len(prompts), bound):.3f}"
                row(name, f"{threshold:g}", share, f"{count} of {len(prompts)}", chance)


if __name__ == "__main__":
    main()
