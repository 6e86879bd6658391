"""`python -m inference_service.tune`: measures depth policies for `neap tune`, which shows the results.

Registry, data folder, device, dtype, threads and context length are settings of the worker, read from the environment. Standard output
gets one JSON object per line: {"measured", "total"} after each measurement, or {"error", "reason"} at the end.
"""

from shared.cpus import size_thread_pools, usable_cpus

if __name__ == "__main__":  # before anything below imports torch
    size_thread_pools()

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from inference_service.engine.engine import Engine
from inference_service.measuring import describe_machine, published_router, say
from inference_service.tune.prompts import read_prompts
from inference_service.tune.results import ResultsFile
from inference_service.tune.sweep import WARM_UP_TOKENS, Sweep, policies
from shared.config import ModelSource, ServiceSettings, make_settings
from shared.errors import InvalidInput, NeapError
from shared.ladder.risk import PublishedRisk
from shared.model.load import load_model
from shared.rpc.logs import configure_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process' exit status: 0, 1 for an error, 130 if it was interrupted."""
    configure_logging("warning")
    options = parse(argv)
    try:
        run(options)
    except NeapError as error:
        say(error=error.message, reason=error.reason)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m inference_service.tune", description=__doc__)
    parser.add_argument("--model", required=True, metavar="ID=SOURCE")
    parser.add_argument("--router", default="latest", help="a version number or an alias")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--threshold", type=float, action="append", default=[])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--results", required=True, type=Path)
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> None:
    """Measures what the results file lacks. Raises `NeapError`."""
    settings = make_settings(ServiceSettings)
    try:
        source = ModelSource.parse(options.model)
    except ValueError as error:
        raise InvalidInput(str(error), reason="BAD_CONFIGURATION") from error
    if options.max_tokens <= WARM_UP_TOKENS:
        raise InvalidInput(f"--max-tokens must be more than {WARM_UP_TOKENS}")
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), usable_cpus()))
    chosen = policies(options.threshold)
    published, ladder = published_router(settings.registry, source.model_id, options.router)
    loaded = load_model(
        source.source,
        model_id=source.model_id,
        dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype),
        device=settings.device,
        context_length=settings.context_length,
    )
    ladder.check_model(loaded)
    prompts = read_prompts(options.prompts, loaded)
    risk = PublishedRisk.of(published.manifest)
    results = ResultsFile(
        options.results,
        {
            "model_id": source.model_id,
            "fingerprint": loaded.fingerprint,
            "router_version": published.version,
            "router_digest": published.manifest_digest,
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
            "num_prompts": len(prompts),
            "max_tokens": options.max_tokens,
            "bound_tokens": risk.num_tokens if risk else None,
            "machine": describe_machine(loaded),
        },
    )
    with Engine(loaded, ladder) as engine:
        engine.warm_up()
        sweep = Sweep(engine, prompts, chosen, max_tokens=options.max_tokens, risk=risk)
        for measurement in sweep.measurements(results.measured):
            results.add(measurement)
            say(measured=len(results.measured), total=sweep.num_measurements)


if __name__ == "__main__":
    sys.exit(main())
