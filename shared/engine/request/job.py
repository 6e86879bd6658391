"""A request from its submission to its end."""

from collections.abc import Callable
from concurrent.futures import Future
from operator import attrgetter
from typing import Any

from shared.engine.request.answer import DecodedAnswer
from shared.engine.request.handle import AfterEvents, GenerationHandle, OnEvent, OnStates
from shared.engine.request.request import GenerationRequest
from shared.engine.request.sequence import DecodingSequence
from shared.ladder.ladder import Ladder

# How often a request is put back into the queue at most. Each time it reads its tokens again.
MAX_PUT_BACK = 8


def _of_request(name: str) -> Any:
    return property(attrgetter(f"request.{name}"))


class EngineJob(GenerationHandle):
    """A request as the engine's thread knows it; its caller sees the handle. The scheduler sees it as a `Schedulable`.

    `num_kv_tokens`: tokens for which it reserves keys and values. `awaited` is the background task that binds its
    ladder. `sequence` is what is being generated: None until the request has been admitted and its ladder found bound,
    and after its end.
    """

    def __init__(
        self,
        request: GenerationRequest,
        ladder: Ladder | None,
        num_kv_tokens: int,
        answer: DecodedAnswer,
        wake: Callable[[], None],
        on_event: OnEvent | None,
        on_states: OnStates | None,
        after_events: AfterEvents | None,
    ) -> None:
        super().__init__(request, wake, on_event, on_states, after_events)
        self.ladder = ladder
        self.num_kv_tokens = num_kv_tokens
        self.answer, self.resumed_texts = answer, answer.resumed_texts
        if request.constraint is not None and answer.constraint is not None:
            self.unenforced = [*request.constraint.unenforced, *answer.constraint.warnings]
        self.num_prompt_tokens = len(request.given_ids)
        self.turn = 0.0
        self._num_put_back = 0
        self.awaited: Future[None] | None = None
        self.sequence: DecodingSequence | None = None

    # As the scheduler asks for them.
    priority: int = _of_request("priority")
    deadline_s: float = _of_request("deadline_s")
    client: str = _of_request("client")
    on_behalf_of: str = _of_request("on_behalf_of")

    @property
    def may_be_put_back(self) -> bool:
        """Whether it may be put back into the queue.
        Not for ever, so that it ends; and states that were shown are not shown again."""
        return self._num_put_back < MAX_PUT_BACK and self.on_states is None

    def count_put_back(self) -> None:
        self._num_put_back += 1
