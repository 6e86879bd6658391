"""One calibration while it runs: what was asked for, where its files are, its time and its progress."""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.plan import Plan
from calibrator_service.calibration.ranks import Ranks
from calibrator_service.calibration.spec import Phase, Progress
from shared.errors import Cancelled, Corrupt
from shared.model.loaded import LoadedModel

# Shares of a calibration's time budget.
# Counting how often answers by the policy relaxed differ.
RELAXED_SHARE = 0.06
# Measuring how much faster the policy exact answers than full depth.
SPEED_SHARE = 0.03
# Training confidence heads and held-out figures; measuring what exits cost, and packing the router.
CONFIDENCE_SHARE, REPORT_SHARE = 0.02, 0.04
# Training heads by gradients, where that is done.
TRAINING_SHARE = 0.28
# A machine or a model for which solving takes longer gets a router late rather than one of no text.
MAX_SOLVING_SHARE = 0.3


class Schedule:
    """When the phases of a calibration end: each at a share of `budget_s`, which may be infinite.
    What solving costs on this machine moves the ends. `trains`: heads are trained after they have been solved."""

    def __init__(self, budget_s: float, *, trains: bool) -> None:
        self._budget_s = budget_s
        self._training_share = TRAINING_SHARE if trains else 0.0
        self._seconds_to_solve: Callable[[float], float] = lambda _: 0.0
        self._solving_share = 0.0

    def expect_solving(self, seconds: Callable[[float], float]) -> None:
        """Solving all heads from so many positions takes `seconds(positions)` here."""
        self._seconds_to_solve = seconds
        self.expect_positions(math.inf)

    def expect_positions(self, count: float) -> None:
        """Heads will be solved from at most `count` positions."""
        self._solving_share = min(self._seconds_to_solve(count) / self._budget_s, MAX_SOLVING_SHARE)

    def budget_for(self, collecting_s: float) -> float:
        """The least time budget, in seconds, that leaves `collecting_s` for collecting and what solving needs."""
        solving_s = self._solving_share * self._budget_s
        return (collecting_s + solving_s) / (self.collecting + self._solving_share)

    @property
    def confidence(self) -> float:
        return 1.0 - REPORT_SHARE - RELAXED_SHARE - SPEED_SHARE

    @property
    def heads(self) -> float:
        return self.confidence - CONFIDENCE_SHARE

    @property
    def collecting(self) -> float:
        return self.heads - self._training_share - self._solving_share


class CalibrationRun:
    """What all phases share. `figures` go out with every report of progress; `seconds` are those of the finished
    phases.

    The time budget counts from the first start: a run that was killed continues with the rest of its budget. Each of
    several `ranks` has a folder of its own; text is shared. Raises `Corrupt` for a state file that cannot be read, and
    `PreconditionFailed` (RANKS_DIFFER).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        folder: Path,
        progress: Callable[[Progress], None],
        should_stop: Callable[[], bool],
        ranks: Ranks | None = None,
    ) -> None:
        self._start_s = time.monotonic()
        self.loaded, self.plan, self.spec, self.ranks = loaded, plan, plan.spec, ranks or Ranks()
        # The scale depends on the device, and what was written at another scale cannot be continued.
        identity = {
            **asdict(replace(self.spec, ranks=1)),
            "model": loaded.text_fingerprint,
            "format": 3,
            "scale": asdict(self.plan.sizes),
        }
        # Generated text is shared by all specs that ask for the same text; states and heads belong to this spec.
        self.text_folder = folder / "text"
        self.folder = folder / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self.should_stop = should_stop
        self.figures: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self._progress, self._fraction = progress, 0.0
        self.schedule = Schedule(plan.budget_s, trains=plan.trains)
        self.ranks.check(model=loaded.fingerprint, plan=(self.folder.name, plan.depths))
        if self.ranks.size > 1:
            self.folder /= f"rank-{self.ranks.rank}-of-{self.ranks.size}"
        self._state_file, self.text_end = self.folder / "state.json", self.folder / "text.json"
        self.text_rest = self.folder / "rest.safetensors"
        # Which text ranks have is decided together. What one of them has lost, with its disk for example, all of them
        # collect anew, from the text.
        text_end = self.text_end.read_text() if self.text_end.exists() else ""
        if len(set(self.ranks.everyones((text_end, self.text_rest.exists(), self.folder.exists())))) > 1:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._spent_before_s = min(self.ranks.everyones(self._read_spent_s()))

    def elapsed_s(self) -> float:
        """Seconds spent on this calibration, including those of runs that were killed."""
        return self._spent_before_s + time.monotonic() - self._start_s

    @property
    def has_collected(self) -> bool:
        """Whether an earlier run of this calibration has finished its collecting phase."""
        return self._spent_before_s > 0.0

    def seconds_until(self, share: float) -> float:
        """Seconds until `share` of the budget is spent; at least 0.05, so that every phase does some work."""
        return max(share * self.plan.budget_s - self.elapsed_s(), 0.05)

    def report(self, phase: Phase, fraction: float) -> None:
        """Reports progress; the reported fraction never decreases. Raises `Cancelled`."""
        if self.should_stop():
            raise Cancelled("the calibration was cancelled")
        self._fraction = max(self._fraction, min(fraction, 1.0))
        self._progress(Progress(phase, self._fraction, dict(self.figures)))

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Scope of one phase. Records how long it took, and writes the time spent to disk."""
        start_s = time.monotonic()
        yield
        self.seconds[phase] = time.monotonic() - start_s
        spent = json.dumps({"elapsed_s": self.elapsed_s()})
        write_atomically(self._state_file, spent.encode())

    def _read_spent_s(self) -> float:
        try:
            return float(json.loads(self._state_file.read_text())["elapsed_s"])
        except FileNotFoundError:
            return 0.0
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt("the calibration's state file cannot be read") from error
