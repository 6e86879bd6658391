"""The text of an answer, and where it ends."""

from shared.constraints.state import ConstraintState
from shared.engine.request.admission import max_answer_tokens
from shared.engine.request.request import FinishReason, GenerationRequest
from shared.engine.request.text import Detokenizer, StopStrings
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel


class DecodedAnswer:
    """Takes the answer's tokens one by one. `end` is why it has ended, and the stop string or token id that ended it;
    None before. `resumed_texts`: what the caller has of its text, token by token.

    `constraint`: the state of the request's constraint, before the first token.

    It begins with the request's `resumed_ids`. Decoding many of them takes as long as several steps, so make it in the
    caller's thread. Raises `InvalidInput` if the answer ended before the last of them (reason RESUMED_BEYOND_END) or
    the constraint does not allow them (CONSTRAINT_BROKEN).
    """

    def __init__(
        self, request: GenerationRequest, loaded: LoadedModel, constraint: ConstraintState | None = None
    ) -> None:
        self.max_tokens = max_answer_tokens(request, loaded.context_length)
        self.num_tokens = 0
        self.end: tuple[FinishReason, str] | None = None
        if self.max_tokens == 0:
            self.end = FinishReason.LENGTH, ""
        self.resumed_texts: list[str] = []
        self.constraint = constraint
        self.end_token_ids = request.stopping.end_token_ids(loaded.eos_token_ids)
        self._stop_token_ids = request.stopping.stop_token_ids
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = Detokenizer(loaded.tokenizer, request.shown_special_ids)
        self._stops = StopStrings(request.stopping.stop_strings)
        for place, token in enumerate(request.resumed_ids):
            if self.end is not None:
                raise InvalidInput(
                    f"the answer ended with token {place} of the {len(request.resumed_ids)} that are there already",
                    reason="RESUMED_BEYOND_END",
                )
            self.resumed_texts.append(self.push(token) or "")

    @property
    def num_left(self) -> int:
        """Tokens that it may still get."""
        return self.max_tokens - self.num_tokens

    def push(self, token_id: int) -> str | None:
        """Adds a token. Returns the text that it completes; None for a stop token, which is not returned to the
        caller."""
        self.num_tokens += 1
        if self.constraint is not None:
            self.constraint.push(token_id)
        if token_id in self._stop_token_ids:
            self.end = FinishReason.STOP_TOKEN, str(token_id)
            return None
        if token_id in self.end_token_ids:
            self.end = FinishReason.EOS, ""
            return ""
        text, stop = self._checked(self._detokenizer.push(token_id))
        if stop is not None:
            self.end = FinishReason.STOP_STRING, stop
        elif self.num_left == 0:
            self.end = FinishReason.LENGTH, ""
        return text

    def rest(self) -> str:
        """The text that was held back. Call it once, after the end.
        Its last bytes may yet complete a stop string, which changes `end`."""
        assert self.end is not None
        if self.end[0] is FinishReason.STOP_STRING:
            return ""
        text, stop = self._checked(self._detokenizer.flush())
        if stop is None:
            return text + self._stops.flush()
        self.end = FinishReason.STOP_STRING, stop
        return text

    def _checked(self, text: str) -> tuple[str, str | None]:
        """As `StopStrings.push`. The text of the first `min_tokens` tokens is no part of a stop string."""
        return (text, None) if self.num_tokens <= self._min_tokens else self._stops.push(text)
