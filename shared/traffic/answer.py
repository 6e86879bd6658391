"""What is kept of a served answer, and the names of pools: those who share a router.

A finished answer is kept as token ids and as what says with what they were made. There is no name, no address, no
request id, no time but the hour and no setting of the request: what is not in `ServedAnswer` is not written anywhere.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.errors import InvalidInput

# The pool of those who name none. Its router is the model's own: `latest`, where another pool's is `latest@POOL`.
DEFAULT_POOL = "default"
ID_BYTES = 16
HOUR_S = 3600
MAX_TOKEN_ID = 2**32 - 1
_POOL = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


def check_pool(pool: str) -> str:
    """Check the name of a pool, which is a part of aliases and paths. Raises InvalidInput (BAD_POOL)."""
    if not _POOL.fullmatch(pool):
        raise InvalidInput(
            f"pool {pool[:40]!r} is not valid: it must have 1 to 32 lower-case letters, digits, '-' and '_', and begin "
            "with a letter or digit",
            reason="BAD_POOL",
        )
    return pool


@dataclass(frozen=True)
class ServedAnswer:
    """A finished answer. `router_version`: 0 without a router. `numerics_id`: of the worker's engine. `hour`: in which
    it ended, in Unix hours. `id`: ID_BYTES random bytes, by which a copy is known."""

    model_id: str
    pool: str
    router_version: int
    numerics_id: str
    hour: int
    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    id: bytes = field(default_factory=lambda: os.urandom(ID_BYTES))

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)
