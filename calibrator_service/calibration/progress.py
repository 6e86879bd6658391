"""What a running calibration reports. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["loading", "collecting", "training_heads", "training_routers", "evaluating", "publishing"]


@dataclass(frozen=True)
class Progress:
    """`fraction`: share of the whole job that is done, in [0, 1]; it never decreases.
    `figures`: named measurements so far."""

    phase: Phase
    fraction: float
    figures: Mapping[str, float] = field(default_factory=dict)
