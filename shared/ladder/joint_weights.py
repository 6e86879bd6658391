"""The weights by which what all proposers say of a position is combined into the probability of each draft."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from shared.errors import Corrupt

# A constant, the weight of the log-odds that the draft's own proposer gives it, and that of the log-odds that the
# other one gives its own draft.
Weights = tuple[float, float, float]
MAX_WEIGHT = 20.0


@dataclass(frozen=True)
class JointWeights:
    """The log-odds of a draft by case: the constant, plus the weights times the log-odds.

    `agree`: a table and an exit propose the token; the own proposer is the table. `table_differs`: the tables' best
    token, while an exit proposes another one; `exit_differs`: that other one; `exit_alone`: the tables are silent.

    The defaults were fitted to 3,787 and 725 verified positions of SmolLM2-135M and Qwen2.5-Coder-1.5B; both give
    nearly the same numbers (docs/decisions/012). A calibration starts from them.
    """

    agree: Weights = (0.55, 0.55, 0.3)
    table_differs: Weights = (-0.5, 0.9, -0.25)
    exit_differs: Weights = (-1.55, 0.75, -0.35)
    exit_alone: Weights = (-1.4, 0.85, 0.0)

    def of(self, case: str) -> Weights:
        weights: Weights = getattr(self, case)
        return weights

    def to_json(self) -> dict[str, list[float]]:
        return {case: list(weights) for case, weights in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Any) -> "JointWeights":
        """Raises `Corrupt` unless `data` has all cases in the form that `to_json` returns."""
        if not isinstance(data, Mapping) or not set(CASES) <= set(data):
            raise Corrupt("the router's joint weights are not lists of numbers by case")
        return cls(**{case: _weights(data[case]) for case in CASES})


DEFAULT_WEIGHTS = JointWeights()
CASES = tuple(field.name for field in fields(JointWeights))
AGREE, TABLE_DIFFERS, EXIT_DIFFERS, EXIT_ALONE = CASES


def _weights(value: Any) -> Weights:
    # Numbers that are not finite fail the comparison.
    is_valid = isinstance(value, list | tuple) and all(
        type(number) in (int, float) and abs(number) <= MAX_WEIGHT for number in value
    )
    if not is_valid or len(value) != 3:
        raise Corrupt(f"joint weights of the router are not three numbers up to {MAX_WEIGHT:g}")
    constant, weight, opposed_weight = map(float, value)
    return constant, weight, opposed_weight
