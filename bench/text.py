"""How fast a calibration writes text: with the model itself, and with a copy of it in bfloat16.

    python -m bench.text --model FILE [--seconds 60] [--rows 64]

Prompts and answers are those of a calibration without given prompts. Both sides write the same items from the start, in
turn, for as long; loading and the engine's start are shown apart.
"""

import tempfile
import time
from contextlib import closing
from pathlib import Path

from bench.options import each_model, load, make_parser
from bench.table import head, row
from calibrator_service.calibration.plan import num_decoded_rows
from calibrator_service.calibration.text.engine_writer import EngineWriter
from calibrator_service.calibration.text.self_generation import SelfGenerationConfig, SelfGenerator
from calibrator_service.calibration.text.writer import Pace, WriteRequest, write_all
from calibrator_service.calibration.text.writers import bfloat16_copy
from shared.model.loaded import LoadedModel


def measure(name: str, loaded: LoadedModel, rows: int, seconds: float) -> None:
    """Prints one row of the table."""
    with closing(EngineWriter(loaded, rows)) as writer, tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        write_all(writer, [WriteRequest((0,), 1)], Pace())
        start_s, written = time.monotonic(), list[int]()
        pace = Pace(is_late=lambda: time.monotonic() - start_s > seconds, on_tokens=written.append)
        generator = SelfGenerator(loaded, SelfGenerationConfig(), Path(folder))
        num_answers = sum(map(len, generator.pieces(writer, pace, Path(folder) / "rest")))
        took_s = time.monotonic() - start_s
        starts = f"{loaded.load_s:.1f}", f"{start_s - began_s:.1f}"
        row(name, *starts, num_answers, sum(written), f"{sum(written) / took_s:.0f}")


def main() -> None:
    parser = make_parser(__doc__, many=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="per side")
    parser.add_argument("--rows", type=int, help="default: those of a calibration")
    for options in each_model(parser):
        loaded = load(options)
        rows = options.rows or num_decoded_rows(loaded)
        head("side", "load, s", "start, s", "answers", "tokens", "tokens/s")
        measure("the model itself", loaded, rows, options.seconds)
        measure("a copy in bfloat16", bfloat16_copy(loaded), rows, options.seconds)


if __name__ == "__main__":
    main()
