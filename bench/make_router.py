"""Makes the router in bench/router: about twenty minutes on two cores, text the model writes itself.

    python -m bench.make_router --model DIR [--tokens 52_000] [--out bench/router] [--work-dir DIR] [--curve 5_000 15_000]
    python -m bench.make_router --model DIR --device cuda --tokens 30_000_000 --work-dir DIR --out DIR

`--curve`: how often each rung agrees with the full model after learning from the first so many tokens, and from all of them (`bench.data_curve`);
on a GPU a hundredth, a thirtieth, a tenth and a third unless told otherwise. A run that was killed goes on where it was, given the same
--work-dir: whole shards of text, and exits whose training had ended, are found again.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from bench.data_curve import CurvePoint, data_curve
from bench.machine import described
from calibrator_service.calibration.pipeline import calibrate
from calibrator_service.calibration.presets import MAX_EPOCHS, resolve
from calibrator_service.calibration.spec import CalibrationSpec, Progress
from shared.ladder.artefact import pack_ladder
from shared.ladder.folder import write_packed
from shared.model.load import LoadedModel, load_model
from shared.model.own_thread import in_own_thread

DEFAULT_TOKENS = 52_000
# Of all tokens, where a GPU makes them.
CURVE_SHARES = (0.01, 1 / 30, 0.1, 1 / 3)
SHOW_INTERVAL_S = 10.0


class Show:
    """Prints progress: each phase, and within one every few seconds, with tokens per second while text is written."""

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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-id", default="smollm2-135m-instruct")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"],
        help="of the model; float32 on a CPU, elsewhere the checkpoint's own",
    )  # fmt: skip
    parser.add_argument("--tokens", "--max-tokens", type=int, default=DEFAULT_TOKENS)
    parser.add_argument("--curve", type=int, nargs="*", help="amounts of tokens; none: no curve")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "router")
    parser.add_argument("--work-dir", type=Path, help="kept, so that a killed run goes on")
    parser.add_argument("--json", type=Path, help="write the curve here")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    shares = CURVE_SHARES if options.device == "cuda" else ()
    curve = [int(share * options.tokens) for share in shares]
    if options.curve is not None:
        curve = options.curve
    if any(not 0 < amount <= options.tokens for amount in curve):
        parser.error("--curve names amounts of tokens up to --tokens")

    print(described(options.device))
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    loaded = load_model(
        options.model, model_id=options.model_id, dtype=dtype, device=options.device
    )
    spec = CalibrationSpec(model_id=options.model_id, max_tokens=options.tokens)
    plan = resolve(spec, loaded)
    print(
        f"{loaded.model.dtype}, {plan.rows} rows decoded together, {plan.training.epochs} of at most {MAX_EPOCHS} epochs "
        f"in batches of {plan.training.batch_size}"
    )
    with ExitStack() as stack:
        folder = options.work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if curve:
            # In a thread that ends, as `calibrate` is (docs/decisions/004).
            points = in_own_thread(_printed_curve, loaded, spec, curve, folder)
            if options.json:
                options.json.write_text(json.dumps([asdict(point) for point in points], indent=1))
        result = calibrate(loaded, spec, work_dir=folder, progress=Show())
    manifest, blobs = pack_ladder(result.ladder, result.report)
    write_packed(options.out, manifest, blobs)
    size = sum(map(len, blobs.values()))
    print(
        f"written to {options.out}: {size / 1e6:.2f} MB, learnt in {result.report['seconds']['total']:.0f} s"
    )


def _printed_curve(
    loaded: LoadedModel, spec: CalibrationSpec, amounts: Sequence[int], folder: Path
) -> list[CurvePoint]:
    points: list[CurvePoint] = []
    for point in data_curve(loaded, spec, [*amounts, spec.max_tokens], folder, progress=Show()):
        points.append(point)
        print(f"\n{point.header()}")
        print("\n".join(each.row() for each in points) + "\n", flush=True)
    return points


if __name__ == "__main__":
    main()
