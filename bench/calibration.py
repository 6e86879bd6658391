"""What a calibration from nothing is worth: exact against full on prompts of another kind, by the seconds that it took.

    python -m bench.calibration --model FILE [--dtype float32] [--budgets 150 900] [--router DIR ..] [--out DIR]
    python -m bench.calibration --model FILE --router DIR --requests FILE.jsonl [--learned 200]
    python -m bench.calibration --model FILE --ranks 1 2 [--learn-tokens 4000] [--repeats 1]

Each budget is a calibration of its own, as `neap calibrate --budget` runs it. Then each prompt is answered at full
depth and with every router in turn, as `bench.decode` does, so that a busy machine slows all sides alike. `--router`:
more routers, which take part as they are. `--requests`: prompts of one kind, a JSON object with "prompt" on each line.
The last `--held-out` of them are measured instead of Spec-Bench, and a router that goes on from the first --router with
`--learned` others takes part. `--out` keeps the routers. `--ranks`: calibrations of `--learn-tokens` tokens by so many
processes in turn, `--repeats` times, as torchrun starts them, each with one thread: the seconds for text and states.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import neap_engine
from bench.decode_figures import EXACT, FULL, measure, print_tables, summarise
from bench.machine import described
from bench.options import add_dtypes, add_prompts, load, make_parser, parsed
from bench.prompts import BenchPrompt, read_prompts, read_texts
from calibrator_service.calibration.pipeline import CalibrationResult, calibrate_together
from calibrator_service.calibration.ranks import joined
from calibrator_service.calibration.spec import Progress
from neap_engine.evaluate.sides import neap
from shared.engine.engine import Engine
from shared.errors import Cancelled
from shared.ladder.folder import read_ladder
from shared.ladder.ladder import Ladder
from shared.ladder.policy import DepthPolicy
from shared.model.loaded import LoadedModel

# By name.
Routers = dict[str, Ladder]


def main() -> None:
    parser = make_parser(__doc__)
    add_prompts(parser, per_task=4)
    add_dtypes(parser)
    parser.add_argument("--budgets", type=float, nargs="*", default=[150.0], help="seconds")
    parser.add_argument("--router", type=Path, nargs="*", default=[])
    parser.add_argument("--requests", type=Path)
    parser.add_argument("--learned", type=int, default=200, help="requests that are learned")
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="folder for the routers that are made")
    parser.add_argument("--ranks", type=int, nargs="*", default=[])
    parser.add_argument("--learn-tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=1)
    options = parsed(parser)
    if options.ranks and "RANK" not in os.environ:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for size in options.ranks * options.repeats:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
            subprocess.run([*launch, "-m", "bench.calibration", *sys.argv[1:]], env=environment, check=True)
        return
    loaded = load(options)
    if options.ranks:
        as_rank(loaded, options.learn_tokens)
        return
    routers: Routers = {path.name: read_ladder(path) for path in options.router}
    if options.requests is None:
        prompts = read_prompts(options.prompts, options.per_task)
        for budget_s in options.budgets:
            spec = neap_engine.CalibrationSpec(time_budget_s=budget_s)
            routers |= calibrated(loaded, spec, f"{budget_s:.0f} s", options.out)
    else:
        prompts = add_one_kind(loaded, routers, options)
    compare(loaded, routers, prompts, options.max_tokens)


def as_rank(loaded: LoadedModel, max_tokens: int) -> None:
    """One process of a calibration by several, until text and states are there. Prints what they took."""
    began_s: dict[str, float] = {}
    last, busy_s = Progress("loading", 0.0), time.process_time()

    def hear(progress: Progress) -> None:
        nonlocal last
        last = progress
        began_s.setdefault(progress.phase, time.monotonic())

    with joined(timeout_s=1800.0) as ranks, suppress(Cancelled):
        calibrate_together(
            loaded,
            neap_engine.CalibrationSpec(max_tokens=max_tokens),
            ranks,
            progress=hear,
            should_stop=lambda: "training_heads" in began_s,
        )
    end_s = began_s.get("training_heads", time.monotonic())
    print(
        f"rank {ranks.rank} of {ranks.size}: {last.figures['tokens']:.0f} tokens and their states in "
        f"{end_s - began_s['collecting']:.1f} s, of a processor {time.process_time() - busy_s:.1f} s",
        flush=True,
    )


def calibrated(
    loaded: LoadedModel, spec: neap_engine.CalibrationSpec, name: str, out: Path | None, **options: object
) -> Routers:
    """A router by its name. Prints what it has learned, and writes it into a folder of that name in `out`."""
    result: CalibrationResult = neap_engine.calibrate(loaded, spec, **options)  # type: ignore[arg-type]
    figures = result.report["proposers"].get("depth-0", {})
    print(
        f"{name}: {result.report['seconds']['total']:.0f} s, {result.report['tokens']['total']:,} tokens learned from "
        f"and measured on; the exit's first draft agrees on {figures.get('agreement_1', 0):.3f} of "
        f"{figures.get('positions', 0)} held-out positions; left out: {result.report['left_out'] or 'nothing'}",
        flush=True,
    )
    if out is not None:
        result.save(out / name.replace(" ", "-"))
    return {name: result.ladder}


def add_one_kind(loaded: LoadedModel, routers: Routers, options: argparse.Namespace) -> list[BenchPrompt]:
    """Adds a router that has learned requests of the kind. Returns the held-out ones."""
    texts = read_texts(options.requests, 0)
    source = neap_engine.SelfGenerated(prompts=tuple(texts[: options.learned]))
    spec = neap_engine.CalibrationSpec(source=source, time_budget_s=options.budgets[0])
    parent = neap_engine.read_parent(options.router[0]) if options.router else None
    name = f"and {options.learned} requests of the kind"
    with tempfile.TemporaryDirectory() as folder:
        routers |= calibrated(loaded, spec, name, options.out, parent=parent, work_dir=Path(folder))
    return [BenchPrompt("one kind", (text,)) for text in texts[-options.held_out :]]


def compare(loaded: LoadedModel, routers: Routers, prompts: list[BenchPrompt], max_tokens: int) -> None:
    """Prints the tables of `bench.decode` for full depth and exact with every router."""
    with Engine(loaded, prefix_cache_bytes=0) as engine:
        engine.warm_up()
        sides = {FULL: neap(engine, DepthPolicy(FULL), None, max_tokens)}
        for name, ladder in routers.items():
            sides[name] = neap(engine, DepthPolicy(EXACT), ladder, max_tokens)
        results = measure(loaded, sides, prompts)
    print(described(loaded.device))
    print_tables(summarise(results))


if __name__ == "__main__":
    main()
