"""Makes a router with this tree alone: the calibration writes the text, learns from it and measures.
Made for bench/router.

    python -m bench.make_router --model FILE --work-dir DIR --hours 1            as the shipped router was made
    python -m bench.make_router --model DIR --work-dir DIR --prompts FILE --tokens 3_000_000
    python -m bench.make_router --model DIR --work-dir DIR --device cuda --tokens 30_000_000 --out DIR

The model answers the prompts of a file (as `neap calibrate --prompts` takes them), or, without one, prompts from
templates and prompts that it writes itself. The same calibration as the service's runs, with `--hours` or `--tokens` as
its limit: with an hour and more, exits are trained by gradients after they have been solved. A run that was killed
continues if it is started again with the same options and --work-dir. The process is niced. The manifest's "made_by"
has the command, without paths.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.machine import described
from bench.options import add_device, add_dtypes, load, make_parser, parsed
from calibrator_service.calibration.pipeline import calibrate
from calibrator_service.calibration.plan import MAX_EPOCHS, resolve
from calibrator_service.calibration.spec import CalibrationSpec, SelfGenerated
from neap_engine.cli.calibrate import parse_depths, read_prompts
from neap_engine.cli.learned_view import print_learned
from neap_engine.face import ProgressLine
from shared.ladder.folder import read_router_folder

PROGRAM = "bench.make_router"
TREE = Path(__file__).parents[1]
DEFAULT_HOURS = 8.0
NICENESS = 10
# The options that decide what the router is, besides --model; the others say where files lie and how the process runs.
RECORDED = (
    "model_id", "device", "dtype", "compute_dtype", "hours", "tokens", "prompts", "max_new_tokens", "seed", "depths",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = make_parser(__doc__)
    add_device(made)
    made.add_argument("--model-id", default="smollm2-135m-instruct")
    add_dtypes(made)
    made.add_argument("--hours", type=float, help=f"default: {DEFAULT_HOURS:g}, or none with --tokens")
    made.add_argument("--tokens", type=int, default=0, help="to learn from; default: what time allows")
    made.add_argument("--prompts", type=Path, help="default: built-in and self-written prompts")
    made.add_argument("--max-new-tokens", type=int, default=0, help="0: the calibration's default")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--depths", default="", help="of exits, as --depths of neap calibrate")
    made.add_argument("--out", type=Path, default=TREE / "bench" / "router")
    made.add_argument("--work-dir", type=Path, required=True, help="so that a killed run can continue")
    made.add_argument("--nice", type=int, default=NICENESS, help=f"default: {NICENESS}")
    return made


def spec_of(options: argparse.Namespace) -> CalibrationSpec:
    """What the options ask the calibration for. Raises InvalidInput, and OSError for a file of prompts that cannot be
    read."""
    prompts = tuple(read_prompts(options.prompts)) if options.prompts else ()
    hours = options.hours or (None if options.tokens else DEFAULT_HOURS)
    return CalibrationSpec(
        model_id=options.model_id,
        source=SelfGenerated(prompts, options.max_new_tokens),
        max_tokens=options.tokens,
        time_budget_s=hours and 3600 * hours,
        seed=options.seed,
        exit_depths=tuple(parse_depths(options.depths)),
    )


def recorded_argv(options: argparse.Namespace) -> list[str]:
    """The command line that makes the same router.
    The model is named by its id, a file of prompts by its place in the tree or its name."""
    argv = ["--model", options.model_id]
    for name in RECORDED:
        value = getattr(options, name)
        if isinstance(value, Path):
            path = value.resolve()
            value = path.relative_to(TREE).as_posix() if path.is_relative_to(TREE) else path.name
        if value not in (None, parser().get_default(name)):
            argv += [f"--{name.replace('_', '-')}", str(value)]
    return argv


def made_by(options: argparse.Namespace) -> dict[str, Any]:
    return {"program": PROGRAM, "argv": recorded_argv(options)}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(parser(), arguments)
    os.nice(options.nice)
    print(described(options.device))
    loaded = load(options, model_id=options.model_id)
    spec = spec_of(options)
    plan = resolve(spec, loaded)
    training = f"at most {MAX_EPOCHS} epochs of training" if plan.trains else "no training"
    print(f"{loaded.model.dtype}, {plan.sizes.rows} rows decoded together, {training}")
    result = calibrate(loaded, spec, work_dir=options.work_dir, progress=ProgressLine())
    replace(result, report={**result.report, "made_by": made_by(options)}).save(options.out)
    manifest, blobs = read_router_folder(options.out)
    print_learned(manifest)
    size = sum(map(len, blobs.values()))
    print(f"written to {options.out}: {size / 1e6:.2f} MB, calibrated in {result.report['seconds']['total']:.0f} s")


if __name__ == "__main__":
    main()
