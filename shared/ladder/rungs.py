"""What a rung answers with."""

from dataclasses import dataclass

SUFFIX = "suffix"
SUCCESSOR = "successor"


def exit_name(depth: int) -> str:
    """Name of the rung with an exit head at `depth`."""
    return f"depth-{depth}"


@dataclass(frozen=True, slots=True)
class Draft:
    """A token proposed before the full model has spoken.

    `probability` is the calibrated chance that the full model's greedy choice is `token`, given that the drafts before it
    in the same chain are right.
    """

    token: int
    probability: float
    rung: str
    depth: int
