"""Shows how far a calibration is."""

import sys
import time

from calibrator_service.calibration.progress import Progress

# Share of the work after which a line is written where lines cannot be replaced.
STEP = 0.1


class ProgressLine:
    """A line on standard error about the state of a calibration: `calibrate(model, spec, progress=ProgressLine())`.

    On a terminal it is replaced; elsewhere a new one follows after each tenth and with each phase.
    """

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._shown = ""
        self._last: tuple[str, int] | None = None

    def __call__(self, progress: Progress) -> None:
        phase = progress.phase.replace("_", " ")
        seconds = time.monotonic() - self._start_s
        line = f"calibrating: {progress.fraction:4.0%}, {phase}, {seconds:.0f} s"
        if sys.stderr.isatty():
            end = "\n" if progress.fraction >= 1.0 else ""
            print("\r" + line.ljust(len(self._shown)), end=end, file=sys.stderr, flush=True)
            self._shown = line
        elif (step := (phase, int(progress.fraction / STEP))) != self._last:
            print(line, file=sys.stderr, flush=True)
            self._last = step
