"""The depth policy: whether tokens may leave early, and what makes such a token final."""

import math
from dataclasses import dataclass
from typing import Literal

from shared.errors import InvalidInput
from shared.field_types import check_types
from shared.ladder.risk import Setting

PolicyName = Literal["full", "exact", "relaxed"]


@dataclass(frozen=True)
class DepthPolicy:
    """`full`: no exits. `exact`: tokens that leave early are drafts, which a verify pass verifies.

    `relaxed` with a `margin`: the verify pass also accepts a draft if the log-probability of its own choice exceeds the
    draft's by at most `margin`. Without one: a token that leaves early is final, unverified, if its probability is at
    least `threshold`.

    `min_layers`: a token may leave only after this many layers. `max_drafts`: upper limit of pending tokens per verify
    pass, or 0 if the planner chooses. Raises `InvalidInput`.
    """

    name: PolicyName = "exact"
    threshold: float = 0.85
    margin: float | None = None
    min_layers: int = 0
    max_drafts: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if self.name not in ("full", "exact", "relaxed"):
            raise InvalidInput(f"depth policy is {self.name!r}; it must be full, exact or relaxed")
        if not 0.0 < self.threshold <= 1.0:
            raise InvalidInput(f"threshold is {self.threshold}; it must be in (0, 1]")
        if self.margin is not None:
            if self.name != "relaxed":
                raise InvalidInput(f"a margin needs the policy relaxed, not {self.name}")
            if not 0.0 <= self.margin < math.inf:
                raise InvalidInput(f"margin is {self.margin}; it must be finite and not negative")
        if self.min_layers < 0:
            raise InvalidInput(f"min_layers is {self.min_layers}; it must not be negative")
        if not 0 <= self.max_drafts <= 64:
            raise InvalidInput(f"max_drafts is {self.max_drafts}; it must be in [0, 64]")

    @property
    def leaves_unverified(self) -> bool:
        """Whether drafts with a probability of at least `threshold` are final without verification."""
        return self.name == "relaxed" and self.margin is None

    @property
    def setting(self) -> Setting:
        """What makes tokens final under policy relaxed."""
        return "threshold" if self.margin is None else "margin"
