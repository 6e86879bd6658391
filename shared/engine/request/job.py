"""A request from its submission to its end."""

from concurrent.futures import Future
from dataclasses import dataclass

from shared.engine.drafting.ladder_cache import Binding
from shared.engine.request.handle import GenerationHandle
from shared.engine.request.sequence import Sequence
from shared.ladder.ladder import Ladder


@dataclass(eq=False)
class Job:
    """What the engine knows of a request. The scheduler sees it as a `Schedulable`.

    `num_kv_tokens`: tokens for which it reserves keys and values. `binding` is None until its ladder has been found bound;
    `awaited` is the background task that binds it. `sequence` is None until the request has been admitted and started.
    """

    handle: GenerationHandle
    ladder: Ladder | None
    num_kv_tokens: int
    binding: Binding | None = None
    awaited: "Future[None] | None" = None
    sequence: Sequence | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.handle.request.prompt_ids)

    @property
    def deadline_s(self) -> float:
        """In `time.monotonic()` seconds."""
        return self.handle.request.deadline_s

    @property
    def is_low_priority(self) -> bool:
        return self.handle.request.is_low_priority

    @property
    def is_cancelled(self) -> bool:
        return self.handle.is_cancelled

    @property
    def is_paused(self) -> bool:
        return self.handle.is_paused
