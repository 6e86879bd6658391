"""`python -m neap_engine.tune`: measures depth policies for `neap tune`, which shows the results.

Registry, data folder, device, dtype, threads and context length are settings of the worker, read from the environment.
Standard output gets one JSON object per line: {"measured", "total"} after each measurement, or {"error", "reason"} at
the end.
"""

from shared.cpus import size_thread_pools

if __name__ == "__main__":  # before anything below imports torch
    size_thread_pools()

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from inference_service.published_bounds import bounds_that_hold
from neap_engine.measuring import describe_machine, load_subject, run_process, say
from neap_engine.tune.prompts import read_prompts
from neap_engine.tune.results import ResultsFile
from neap_engine.tune.sweep import (
    WARM_UP_TOKENS,
    Sweep,
    covered_tokens,
    policies,
)
from shared.engine.engine import Engine
from shared.errors import InvalidInput


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process' exit status."""
    options = parse(argv)
    return run_process(lambda: run(options))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m neap_engine.tune", description=__doc__)
    parser.add_argument("--model", required=True, metavar="ID=SOURCE")
    parser.add_argument("--router", default="latest", help="a version number or an alias")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--threshold", type=float, action="append", default=[])
    parser.add_argument("--margin", type=float, action="append", default=[])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--results", required=True, type=Path)
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> None:
    """Measures what the results file lacks. Raises `NeapError`."""
    if options.max_tokens <= WARM_UP_TOKENS:
        raise InvalidInput(f"--max-tokens must be more than {WARM_UP_TOKENS}")
    chosen = policies(options.threshold, options.margin)
    subject = load_subject(options.model, options.router)
    loaded, published = subject.loaded, subject.published
    prompts = read_prompts(options.prompts, loaded)
    bounds = bounds_that_hold(published.manifest, loaded)
    results = ResultsFile(
        options.results,
        {
            "model_id": loaded.model_id,
            "fingerprint": loaded.fingerprint,
            "router_version": published.version,
            "router_digest": published.manifest_digest,
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
            "num_prompts": len(prompts),
            "max_tokens": options.max_tokens,
            "bound_tokens": covered_tokens(bounds),
            "machine": describe_machine(loaded),
        },
    )
    with Engine(loaded, subject.ladder) as engine:
        engine.warm_up()
        sweep = Sweep(engine, prompts, chosen, max_tokens=options.max_tokens, bounds=bounds)
        for measurement in sweep.measurements(results.measured):
            results.add(measurement)
            say(measured=len(results.measured), total=sweep.num_measurements)


if __name__ == "__main__":
    sys.exit(main())
