"""What is kept of a served answer.

A finished answer is kept as token ids and as what says with what they were made. There is no name, no address, no
request id, no time but the hour and no setting of the request: what is not in `ServedAnswer` is not written anywhere.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

ID_BYTES = 16
HOUR_S = 3600


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
