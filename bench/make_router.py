"""Makes the router in bench/router: about twenty minutes on two cores, text the model writes itself.

python -m bench.make_router --model DIR [--max-tokens 52000] [--out bench/router] [--work-dir DIR]
"""

import argparse
from pathlib import Path

from calibrator_service.calibration.pipeline import calibrate
from calibrator_service.calibration.spec import CalibrationSpec, Progress
from shared.ladder.artefact import pack_ladder
from shared.ladder.folder import write_packed
from shared.model.load import load_model

DEFAULT_TOKENS = 52_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-id", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_TOKENS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "router")
    parser.add_argument("--work-dir", type=Path, help="kept, so that a killed run goes on")
    options = parser.parse_args()

    def show(progress: Progress) -> None:
        print(f"{progress.phase} {progress.fraction:.0%}", flush=True)

    loaded = load_model(options.model, model_id=options.model_id)
    spec = CalibrationSpec(model_id=options.model_id, max_tokens=options.max_tokens)
    result = calibrate(loaded, spec, work_dir=options.work_dir, progress=show)
    write_packed(options.out, *pack_ladder(result.ladder, result.report))
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
