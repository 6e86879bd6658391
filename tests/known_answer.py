"""Requests of one prompt, and drafts that follow its answer."""

from collections.abc import Callable, Sequence

from shared.engine.request.request import GenerationRequest, StoppingParams
from shared.ladder.policy import DepthPolicy
from tests.families import VOCABULARY_SIZE

PROMPT = tuple(range(5, 25))
NUM_NEW = 24
FULL = DepthPolicy("full")
DRAFTING = DepthPolicy("exact", max_drafts=4)


def request(max_tokens: int = NUM_NEW, **changes: object) -> GenerationRequest:
    """A request for exactly `max_tokens` tokens after PROMPT, of policy full."""
    stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(**{"prompt_ids": PROMPT, "policy": FULL, "stopping": stopping, **changes})


def right(answer: Sequence[int], wrong_at: int | None = None) -> Callable[[list[int]], int]:
    """Given all tokens so far, the next one of `answer`, or another one at the place `wrong_at`. After its end, 0."""

    def token(context: list[int]) -> int:
        place = len(context) - len(PROMPT)
        known = answer[place] if place < len(answer) else 0
        return (known + (place == wrong_at)) % VOCABULARY_SIZE

    return token
