"""One calibration while it runs: what was asked for, where it keeps its files, its time and its progress."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from calibrator_service.calibration.plan import Plan, bounded, resolve
from calibrator_service.calibration.spec import CalibrationSpec, Phase, Progress
from calibrator_service.calibration.text.shards import write_atomically
from shared.errors import Cancelled, Corrupt
from shared.model.load import LoadedModel

T = TypeVar("T")


class Run:
    """What the phases share. `figures` go out with every report of progress.

    Time counts from the first start: a run that was killed goes on with what is left of its budget. Raises `InvalidInput` for a
    spec that does not fit the model, `Corrupt` for a state file that cannot be read.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        spec: CalibrationSpec,
        folder: Path,
        progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._started = time.monotonic()
        self.loaded, self.spec = loaded, bounded(spec)
        self.plan: Plan = resolve(self.spec, loaded)
        # What was begun on another device was begun otherwise.
        identity = json.dumps(
            {
                **asdict(self.spec),
                "model": loaded.fingerprint,
                "format": 2,
                "scale": asdict(self.plan.scale),
            }
        )
        # Generated text is shared by every spec that asks for the same; states and heads are this spec's own.
        self.text_folder = folder / "text"
        self.folder = folder / hashlib.sha256(identity.encode()).hexdigest()[:16]
        self.should_stop = should_stop
        self.figures: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self._progress, self._fraction = progress, 0.0
        self._state_file = self.folder / "state.json"
        self._spent_before = self._read_spent()

    def elapsed_s(self) -> float:
        return self._spent_before + time.monotonic() - self._started

    def left_s(self, share: float) -> float:
        """Seconds until `share` of the budget is spent; never none, so that every phase does something."""
        return max(share * self.plan.budget_s - self.elapsed_s(), 0.05)

    def tell(self, phase: Phase, fraction: float) -> None:
        """Reports progress, which never falls. Raises `Cancelled`."""
        if self.should_stop():
            raise Cancelled("the calibration was cancelled")
        self._fraction = max(self._fraction, min(fraction, 1.0))
        self._progress(Progress(phase, self._fraction, dict(self.figures)))

    def timed(self, phase: Phase, work: Callable[[], T]) -> T:
        """Does the work of a phase and keeps, also on disk, how long it took."""
        before = time.monotonic()
        result = work()
        self.seconds[phase] = time.monotonic() - before
        spent = json.dumps({"elapsed_s": self.elapsed_s()})
        write_atomically(self._state_file, spent.encode())
        return result

    def _read_spent(self) -> float:
        try:
            return float(json.loads(self._state_file.read_text())["elapsed_s"])
        except FileNotFoundError:
            return 0.0
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt("the calibration's state file cannot be read") from error
