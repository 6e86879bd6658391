"""Tables of real ladders whose drafts the test writes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from shared.ladder.ladder import BoundLadder, Ladder
from shared.ladder.tables import SequenceTables
from shared.ops.drafting import Script

# Given the drafts of the chain so far, the next one's (token, probability), or None.
Table = Callable[[Sequence[int]], tuple[int, float] | None]


def native_script(table: Table) -> Any:
    """A proposer in Python as native tables call it."""

    def propose(drafted: Any, count: int, probability: Any) -> int:
        found = table(drafted[:count])
        if found is None:
            return -1
        token, probability[0] = found
        return token

    return Script(propose)


def without_tables(ladder: Ladder) -> Ladder:
    return replace(ladder, lookup_confidence=None, ngrams=None, ngram_confidence=None)


def script_tables(monkeypatch: pytest.MonkeyPatch, *tables: Table) -> None:
    """The next sequences have these tables, one each; the last one has all that follow."""
    left = list(tables)

    def make(self: BoundLadder, *arguments: Any) -> SequenceTables:
        table = left.pop(0) if len(left) > 1 else left[0]
        return SequenceTables(*arguments, script=native_script(table))

    monkeypatch.setattr(BoundLadder, "tables", make)
