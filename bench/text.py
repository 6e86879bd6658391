"""How fast a calibration writes text: with the model itself, and with a copy of it in bfloat16.

    python -m bench.text --model FILE [--seconds 60] [--rows 64]

Prompts and answers are those of a calibration without given prompts. Both sides write the same items from the start, in turn, for as
long; loading and the engine's start are shown apart.
"""

import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bench.options import make_parser, parsed
from calibrator_service.calibration.plan import num_decoded_rows
from calibrator_service.calibration.text.engine_writer import EngineWriter
from calibrator_service.calibration.text.self_generation import SelfGenerationConfig, SelfGenerator
from calibrator_service.calibration.text.writer import Pace, WriteRequest, write_all
from calibrator_service.calibration.text.writers import bfloat16_copy
from shared.model.load import load_model
from shared.model.loaded import LoadedModel


@dataclass
class Counter:
    """Counts the tokens written since `start_s`."""

    start_s: float
    seconds: float
    num_tokens: int = 0

    def add(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def is_late(self) -> bool:
        return time.monotonic() - self.start_s > self.seconds


def measure(name: str, loaded: LoadedModel, rows: int, seconds: float) -> None:
    """Prints one row of the table."""
    with closing(EngineWriter(loaded, rows)) as writer, tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        write_all(writer, [WriteRequest((0,), 1)], Pace())
        counter = Counter(time.monotonic(), seconds)
        pace = Pace(is_late=counter.is_late, on_tokens=counter.add)
        generator = SelfGenerator(loaded, SelfGenerationConfig(), Path(folder))
        num_answers = sum(map(len, generator.pieces(writer, pace, Path(folder) / "rest")))
        took_s = time.monotonic() - counter.start_s
        print(
            f"| {name} | {loaded.load_s:.1f} | {counter.start_s - began_s:.1f} | {num_answers} | {counter.num_tokens} "
            f"| {counter.num_tokens / took_s:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="per side")
    parser.add_argument("--rows", type=int, help="default: those of a calibration")
    options = parsed(parser)
    loaded = load_model(options.model)
    rows = options.rows or num_decoded_rows(loaded)
    print("| side | load, s | start, s | answers | tokens | tokens/s |\n|---|---|---|---|---|---|")
    measure("the model itself", loaded, rows, options.seconds)
    measure("a copy in bfloat16", bfloat16_copy(loaded), rows, options.seconds)


if __name__ == "__main__":
    main()
