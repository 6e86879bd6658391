"""What is asked of a request before any work is done for it."""

import time
from collections.abc import Callable

from inference_service.engine.memory import whole_pages
from inference_service.engine.planner import PassCosts
from inference_service.engine.prompt import check_prompt_ids
from inference_service.engine.request import DEFAULT_MAX_TOKENS, GenerationRequest
from shared.errors import DeadlineExceeded, Exhausted, InvalidInput, PreconditionFailed
from shared.ladder.ladder import Ladder
from shared.model.load import LoadedModel


def num_slots(request: GenerationRequest, context_length: int) -> int:
    """Positions that a request may come to fill: its prompt and its longest answer."""
    room = context_length - len(request.prompt_ids)
    return len(request.prompt_ids) + min(request.stopping.max_tokens or DEFAULT_MAX_TOKENS, room)


class Admission:
    """Checks requests against model, router, memory and clock. `slot_bytes`: keys and values of one position, all layers.

    `kv_budget_bytes` is for all running requests together, given out `page_slots` positions at a time. `costs` None: not measured
    yet.
    """

    def __init__(
        self, loaded: LoadedModel, slot_bytes: int, kv_budget_bytes: int, page_slots: int = 1
    ) -> None:
        self._page_slots = page_slots
        self.slot_bytes = slot_bytes
        self.kv_budget_bytes = kv_budget_bytes
        self.costs: PassCosts | None = None
        self._loaded = loaded

    def kv_bytes(self, request: GenerationRequest) -> int:
        """What the request's keys and values may come to take."""
        slots = num_slots(request, self._loaded.context_length)
        return whole_pages(slots, self._page_slots) * self.slot_bytes

    def check(
        self, request: GenerationRequest, ladder: Ladder | None, num_known: Callable[[], int]
    ) -> None:
        """`num_known` tells how many tokens of the prompt need not be read; it is asked only where that matters.

        Raises `InvalidInput`, `PromptTooLong`, `PreconditionFailed` (reason ROUTER_REQUIRED), `RouterMismatch`,
        `DeadlineExceeded` and `Exhausted` (reason KV_BUDGET).
        """
        self._check_against_model(request, ladder)
        needed = self.kv_bytes(request)
        if needed > self.kv_budget_bytes:
            raise Exhausted(
                f"keys and values of this request may take {needed} bytes; this worker has {self.kv_budget_bytes} for all",
                reason="KV_BUDGET",
                metadata={"needed": str(needed), "budget": str(self.kv_budget_bytes)},
            )
        left_s = request.deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the deadline had passed before the request was queued")
        prefill_s = self._least_prefill_s(len(request.prompt_ids))
        if left_s < prefill_s:
            prefill_s = self._least_prefill_s(len(request.prompt_ids) - num_known())
        if left_s < prefill_s:
            raise DeadlineExceeded(
                f"reading the prompt alone takes at least {prefill_s:.1f} s, longer than the deadline allows",
                reason="DEADLINE_TOO_SHORT",
            )

    def _check_against_model(self, request: GenerationRequest, ladder: Ladder | None) -> None:
        check_prompt_ids(self._loaded, request.prompt_ids)
        max_tokens = request.stopping.max_tokens
        room = self._loaded.context_length - len(request.prompt_ids)
        if max_tokens is not None and max_tokens > room:
            raise InvalidInput(
                f"max_tokens is {max_tokens}, but the context leaves {room} after the prompt",
                reason="MAX_TOKENS_TOO_LARGE",
                metadata={"available": str(room)},
            )
        if request.logprobs is not None and request.logprobs > self._loaded.vocabulary_size:
            raise InvalidInput(
                f"logprobs is {request.logprobs}; the model has {self._loaded.vocabulary_size} tokens"
            )
        if request.policy.min_layers > self._loaded.num_layers:
            raise InvalidInput(
                f"min_layers is {request.policy.min_layers}; the model has {self._loaded.num_layers} layers"
            )
        if request.policy.name != "full":
            if ladder is None:
                raise PreconditionFailed(
                    f"policy {request.policy.name} needs a router, and none is loaded",
                    reason="ROUTER_REQUIRED",
                )
            ladder.check_model(self._loaded)

    def _least_prefill_s(self, num_tokens: int) -> float:
        """Less than reading so many tokens can ever take: half the measured time of wide passes. 0 while cold."""
        if self.costs is None or not self.costs.wide:
            return 0.0
        width, seconds = self.costs.wide[-1]
        return 0.5 * seconds * (num_tokens // width)
