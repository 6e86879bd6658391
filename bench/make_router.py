"""Calibrates a router for bench/router on text that the model writes itself, or has written. On two cores 52,000 tokens take about
twenty minutes. bench/RESULTS.md has the command of the router that is there.

    python -m bench.make_router --model DIR [--tokens 52_000] [--out bench/router] [--work-dir DIR]
    python -m bench.make_router --model DIR --answers FILE.jsonl --tokens 300_000
    python -m bench.make_router --model DIR --device cuda --tokens 30_000_000 --work-dir DIR --out DIR

`--answers`: prompts and answers of the model, as `neap calibrate --answers` takes them; there is no other text then. A
killed run continues if it is started with the same --work-dir: complete shards of text and exits that are fully trained are reused.
"""

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from shared.cli.curve_view import print_curve

from bench.machine import described
from bench.options import add_device, make_parser, parsed
from calibrator_service.calibration.pipeline import calibrate
from calibrator_service.calibration.plan import MAX_EPOCHS, resolve
from calibrator_service.calibration.progress import Progress
from calibrator_service.calibration.spec import AnswerFile, CalibrationSpec, SelfGenerated
from shared.configured_model import dtype_named
from shared.ladder.artefact import pack_ladder
from shared.ladder.folder import write_router_folder
from shared.model.load import load_model

DEFAULT_TOKENS = 52_000
SHOW_INTERVAL_S = 10.0


class Show:
    """Prints progress at each new phase and every SHOW_INTERVAL_S seconds, with tokens per second while text is generated."""

    def __init__(self) -> None:
        self._phase, self._shown_s, self._written = "", 0.0, 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.phase == self._phase and now - self._shown_s < SHOW_INTERVAL_S:
            return
        written = progress.figures.get("generated_tokens", 0.0)
        rate = (written - self._written) / (now - self._shown_s)
        speed = f", {rate:,.0f} tokens/s" if 0 < self._written < written else ""
        print(f"{progress.phase} {progress.fraction:.0%}{speed}", flush=True)
        self._phase, self._shown_s, self._written = progress.phase, now, written


def main() -> None:
    parser = make_parser(__doc__)
    add_device(parser)
    parser.add_argument("--model-id", default="smollm2-135m-instruct")
    parser.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"],
        help="of the model; default: float32 on a CPU, the checkpoint's own on a GPU",
    )  # fmt: skip
    parser.add_argument(
        "--compute-dtype", choices=["bfloat16"],
        help="multiply in it on a CPU, as --compute-dtype of the services; with --dtype bfloat16",
    )  # fmt: skip
    parser.add_argument("--tokens", "--max-tokens", type=int, default=DEFAULT_TOKENS)
    parser.add_argument("--answers", type=Path, help="JSONL file; default: the model writes text")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "router")
    parser.add_argument("--work-dir", type=Path, help="kept, so that a killed run can continue")
    options = parsed(parser)

    print(described(options.device))
    loaded = load_model(
        options.model,
        model_id=options.model_id,
        dtype=dtype_named(options.dtype or "auto"),
        compute_dtype=dtype_named(options.compute_dtype or "auto"),
        device=options.device,
    )
    spec = CalibrationSpec(
        model_id=options.model_id,
        source=AnswerFile(str(options.answers)) if options.answers else SelfGenerated(),
        max_tokens=options.tokens,
    )
    plan = resolve(spec, loaded)
    print(
        f"{loaded.model.dtype}, {plan.rows} rows decoded together, {plan.training.epochs} of at most {MAX_EPOCHS} epochs "
        f"in batches of {plan.training.batch_size}"
    )
    with ExitStack() as stack:
        folder = options.work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = calibrate(loaded, spec, work_dir=folder, progress=Show())
    print_curve({"calibration": result.report})
    manifest, blobs = pack_ladder(result.ladder, result.report)
    write_router_folder(options.out, manifest, blobs)
    size = sum(map(len, blobs.values()))
    print(
        f"written to {options.out}: {size / 1e6:.2f} MB, calibrated in {result.report['seconds']['total']:.0f} s"
    )


if __name__ == "__main__":
    main()
