"""Failures of single requests, and the errors that their callers get."""

import copy
import logging
from collections.abc import Callable, Iterable
from typing import ParamSpec, Protocol, TypeVar

from shared.engine.request.request import GenerationRequest
from shared.errors import RETRY_AFTER_S, Exhausted, NeapError
from shared.model.cache import is_out_of_memory

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class FailableSequence(Protocol):
    """A sequence. `failure` is None until its work fails; a failed sequence takes part in no further step."""

    failure: NeapError | None

    @property
    def request(self) -> GenerationRequest: ...


def failure_of(error: BaseException) -> NeapError:
    """The error that a caller gets for `error`: a new one without a traceback, because the traceback's frames hold
    caches."""
    if isinstance(error, NeapError):
        return copy.copy(error)
    if is_out_of_memory(error):
        return Exhausted(
            "there is no memory left for this request", reason="OUT_OF_MEMORY", retry_after_s=RETRY_AFTER_S
        )
    return NeapError("the request failed inside the engine")


def non_finite_logits() -> NeapError:
    """For a request whose next token the model cannot choose."""
    return NeapError(
        "the model's logits are not finite after this text, so there is no next token", reason="NON_FINITE_LOGITS"
    )


def attempt(sequence: FailableSequence, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Calls `work(*args, **kwargs)`, which must concern `sequence` alone.
    If it raises, the sequence fails and the result is None."""
    try:
        return work(*args, **kwargs)
    except Exception as error:
        fail_all([sequence], error, "a request failed")
        return None


def fail_all(sequences: Iterable[FailableSequence], error: Exception, what: str) -> None:
    """Fails all sequences that shared the work that raised `error`. Logs `what` with the traceback.
    Call it while handling `error`."""
    failed = list(sequences)
    names = ", ".join(sequence.request.request_id or "-" for sequence in failed)
    logger.error("%s: %s", what, names, exc_info=error)
    for sequence in failed:
        sequence.failure = failure_of(error)
