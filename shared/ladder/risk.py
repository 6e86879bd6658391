"""What a published router promises of the policy relaxed: on how many prompts its output may differ from the full model's.

In the manifest, certified by Learn-then-Test over whole generations (loss 1 where any token differs, greedy):

    "risk": {"loss": "generation_differs", "delta": 0.05, "num_prompts": 400, "max_new_tokens": 128,
             "bounds": [{"threshold": 0.97, "epsilon": 0.05}, ..], ..}

Each bound holds for its router threshold and for all above it, all together with confidence 1 - delta. They speak of prompts like
those the calibration drew, of greedy answers without a repetition penalty, and of an answer's first max_new_tokens up to its first
end of sequence; without that field, of all of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import Corrupt

LOSS = "generation_differs"
MAX_BOUNDS = 16


@dataclass(frozen=True)
class RiskBound:
    """At most a share `epsilon` of prompts differs, where tokens are final from router probability `threshold` on."""

    threshold: float
    epsilon: float


@dataclass(frozen=True)
class PublishedRisk:
    """`delta`: with how much probability the certification itself was wrong; `num_tokens`: of an answer, None: all."""

    delta: float
    bounds: tuple[RiskBound, ...]
    num_tokens: int | None = None

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "PublishedRisk | None":
        """None where none is published. Raises Corrupt for one that is not as described above."""
        record = manifest.get("risk")
        if record is None:
            return None
        try:
            bounds = tuple(
                RiskBound(_share(row["threshold"]), _share(row["epsilon"]))
                for row in record["bounds"]
            )
            delta = _share(record["delta"])
            is_known = record["loss"] == LOSS
            num_tokens = record.get("max_new_tokens")
            if num_tokens is not None and (type(num_tokens) is not int or num_tokens < 1):
                raise ValueError(f"{num_tokens!r} is no number of tokens")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Corrupt("the router's risk table lacks or garbles a field") from error
        if not is_known or not 1 <= len(bounds) <= MAX_BOUNDS:
            raise Corrupt("the router's risk table is of an unknown loss, or not of 1 to 16 bounds")
        return cls(delta, bounds, num_tokens)

    def epsilon_at(self, threshold: float) -> float | None:
        """The best bound that holds for a request's threshold; None: it is bolder than anything that was certified."""
        holding = [bound.epsilon for bound in self.bounds if bound.threshold <= threshold]
        return min(holding, default=None)


def _share(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not (math.isfinite(number) and 0.0 < number < 1.0):
        raise ValueError(f"{value!r} is not in (0, 1)")
    return number
