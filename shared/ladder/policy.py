"""The depth policy: whether tokens may leave early, and which of these drafts the verify pass accepts."""

from dataclasses import dataclass
from typing import Literal

from shared.errors import InvalidInput
from shared.field_types import check_limits, check_types

PolicyName = Literal["full", "exact", "relaxed"]
# The threshold of relaxed where neither a threshold nor a margin is given: TIDE's.
DEFAULT_THRESHOLD = 0.85


@dataclass(frozen=True)
class DepthPolicy:
    """`full`: no exits. `exact`: tokens that leave early are drafts, and the verify pass accepts those that the full
    model chooses.

    `relaxed` is lossy: the verify pass also accepts a draft if the log-probability of its own choice exceeds the
    draft's by at most `margin`, or if the draft's calibrated probability is at least `threshold`. With neither of them
    the threshold is DEFAULT_THRESHOLD.

    `min_layers`: a token may leave only after this many layers. `max_drafts`: upper limit of pending tokens per verify
    pass, or 0 if the planner chooses. Raises `InvalidInput`.
    """

    name: PolicyName = "exact"
    threshold: float | None = None
    margin: float | None = None
    min_layers: int = 0
    max_drafts: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if self.name not in ("full", "exact", "relaxed"):
            raise InvalidInput(f"depth policy is {self.name!r}; it must be full, exact or relaxed")
        for what, value in (("threshold", self.threshold), ("margin", self.margin)):
            if value is not None and self.name != "relaxed":
                raise InvalidInput(f"a {what} needs the policy relaxed, not {self.name}")
        if self.name == "relaxed" and self.threshold is None and self.margin is None:
            object.__setattr__(self, "threshold", DEFAULT_THRESHOLD)  # frozen from here on; this is still construction
        for message in ("DepthPolicy", "Exact", "Relaxed"):
            check_limits(self, message)
