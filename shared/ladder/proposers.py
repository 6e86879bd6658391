"""Names of proposers, what a table knows of a context, and the draft that one proposes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

PROMPT_LOOKUP = "prompt-lookup"
NGRAM_TABLE = "ngram-table"
# Not part of a router: the worker's own table, which learns from answers.
LEARNED = "learned"
# Nor are these: what the constraint of a request forces, and the text that a request expects.
GRAMMAR = "grammar"
PREDICTION = "prediction"
NOT_CALIBRATED = frozenset((LEARNED, GRAMMAR, PREDICTION))
# Width of a confidence head's hidden layer. Here, because services check specs without torch.
DEFAULT_CONFIDENCE_WIDTH = 128
# What the names of proposers with an exit head begin with, and no others do.
EXIT = "depth-"


# By the numbers that native drafting gives them. Those of exits follow, shallowest first.
_NUMBERED = (PROMPT_LOOKUP, NGRAM_TABLE, LEARNED, PREDICTION, GRAMMAR)


def numbered(exit_names: Iterable[str]) -> tuple[str, ...]:
    """All proposers of a ladder with these exits, by number."""
    return (*_NUMBERED, *exit_names)


def exit_name(depth: int) -> str:
    """Name of the proposer with an exit head at `depth`."""
    return f"{EXIT}{depth}"


# Not frozen: many are made a step, and to freeze one takes longer than all else.
@dataclass(slots=True)
class Match:
    """What a table knows of a context of `length` tokens: `token` followed it `count` times, a `share` of all times
    that it knows of."""

    token: int
    length: int
    count: int
    share: float


class Draft(NamedTuple):
    """A token that a proposer proposes before the full model has run for it.

    `probability`: that the full model's greedy choice is `token`, given that the drafts before it in the same chain are
    right. `proposer`: the proposer's name. `depth`: layers run for it.
    """

    token: int
    probability: float
    proposer: str
    depth: int

    @property
    def is_exit(self) -> bool:
        """Whether an exit head has made it."""
        return self.proposer.startswith(EXIT)
