"""The router that a calibration goes on from."""

from dataclasses import dataclass, replace
from pathlib import Path

from calibrator_service.calibration.spec import CalibrationSpec, ParentRouter
from calibrator_service.calibration.statistics import Statistics, read_statistics
from shared.errors import InvalidInput

# Moves a seed by generation, so that nobody gets an ancestor's seed by counting up.
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Parent:
    """`router`: which it is and how much its tokens count; `statistics`: what it was made from, its own parents'
    included."""

    router: ParentRouter
    statistics: Statistics

    @classmethod
    def read(cls, path: Path, router: ParentRouter) -> "Parent":
        """`path`: the router's file of statistics. Raises as `read_statistics`."""
        return cls(router, read_statistics(path))

    def spec_of_child(self, spec: CalibrationSpec) -> CalibrationSpec:
        """The spec with this parent, and with a seed that its ancestors did not have: with theirs the model would write
        their text again.

        Raises `InvalidInput` (BAD_SPEC) if the spec names another parent.
        """
        if spec.parent not in (None, self.router):
            raise InvalidInput("the spec names another parent than the one that is given", reason="BAD_SPEC")
        seed = (spec.seed + (self.statistics.generation + 1) * _SEED_STEP) % 2**63
        return replace(spec, parent=self.router, seed=seed)
