"""The text of an answer, and where it ends: tokens become whole characters, and no part of a stop string."""

from collections.abc import Collection, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from tokenizers import decoders
from transformers import PreTrainedTokenizerBase

from shared.constraints.state import ConstraintState
from shared.engine.request.admission import max_answer_tokens
from shared.engine.request.request import FinishReason, GenerationRequest
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel
from shared.ops import NO_TOKEN

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so tokens that are no valid text after this many more tokens never will be.
MAX_INCOMPLETE_TOKENS = 8
# The characters in which byte-level tokenizers (GPT-2's) write bytes: themselves where they can be seen, and for others
# those from 256 on.
_SEEN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTES = {chr(byte): byte for byte in _SEEN} | {chr(256 + place): byte for place, byte in enumerate(_UNSEEN)}


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
        self._request = request
        self._detokenizer = Detokenizer(loaded.tokenizer, request.shown_special_ids)
        stop_strings = request.stopping.stop_strings
        self._stops = StopStrings(stop_strings) if stop_strings else None
        # Whether texts and their number are all that its tokens change.
        self._is_plain = constraint is None and not stop_strings
        for place, token in enumerate(request.resumed_ids):
            if self.end is not None:
                raise InvalidInput(
                    f"the answer ended with token {place} of the {len(request.resumed_ids)} that are there already",
                    reason="RESUMED_BEYOND_END",
                )
            self.resumed_texts += self.push([token]) or [""]

    @property
    def num_left(self) -> int:
        """Tokens that it may still get."""
        return self.max_tokens - self.num_tokens

    def take(self, texts: Sequence[str]) -> bool:
        """Adds tokens that do not end the answer by their `TokenTexts`, if these are all that is to be known of them.
        Returns whether it has."""
        if not texts or not self._is_plain or not self._detokenizer.is_whole or not all(texts):
            return False
        self.num_tokens += len(texts)
        return True

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """Adds tokens, up to the one that ends the answer. Returns the text that each completes, but for a stop token,
        which is not returned to the caller."""
        num_tokens = self.num_tokens + len(token_ids)
        goes_on = num_tokens < self.max_tokens and self.end is None and self.end_token_ids.isdisjoint(token_ids)
        if goes_on and self._is_plain:
            self.num_tokens = num_tokens
            return self._detokenizer.push_all(token_ids)
        texts: list[str] = []
        for token_id in token_ids:
            if self.end is not None:
                break
            self.num_tokens += 1
            if self.constraint is not None:
                self.constraint.push(token_id)
            if token_id in self._request.stopping.stop_token_ids:
                self.end = FinishReason.STOP_TOKEN, str(token_id)
                break
            if token_id in self.end_token_ids:
                self.end = FinishReason.EOS, ""
                texts.append("")
                break
            text, stop = self._checked(self._detokenizer.push(token_id))
            texts.append(text)
            if stop is not None:
                self.end = FinishReason.STOP_STRING, stop
            elif self.num_tokens == self.max_tokens:
                self.end = FinishReason.LENGTH, ""
        return texts

    def rest(self) -> str:
        """The text that was held back. Call it once, after the end.
        Its last bytes may yet complete a stop string, which changes `end`."""
        assert self.end is not None
        if self.end[0] is FinishReason.STOP_STRING:
            return ""
        text, stop = self._checked(self._detokenizer.flush())
        if stop is None:
            return text + (self._stops.flush() if self._stops else "")
        self.end = FinishReason.STOP_STRING, stop
        return text

    def _checked(self, text: str) -> tuple[str, str | None]:
        """As `StopStrings.push`. The text of the first `min_tokens` tokens is no part of a stop string."""
        if self._stops is None or self.num_tokens <= self._request.sampling.min_tokens:
            return text, None
        return self._stops.push(text)


class TokenBytes(dict[int, bytes]):
    """The bytes of a byte-level tokenizer's tokens, each found when it is first asked for. Special tokens have none.

    All of them, read as UTF-8, are what the tokenizer itself makes of the tokens, which takes five times as long.
    """

    _of: ClassVar[WeakKeyDictionary[PreTrainedTokenizerBase, "TokenBytes | None"]] = WeakKeyDictionary()

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend
        self.texts = TokenTexts(self)
        added = backend.get_added_tokens_decoder().items()
        self.update((token_id, b"") for token_id, token in added if token.special)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        is_level = all(character in _BYTES for character in token)  # others were added as they are
        self[token_id] = found = bytes(map(_BYTES.__getitem__, token)) if is_level else token.encode()
        return found

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "TokenBytes | None":
        """Those of a tokenizer, which share them; None if it is not byte-level."""
        if tokenizer not in cls._of:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            is_level = isinstance(getattr(backend, "decoder", None), decoders.ByteLevel)
            cls._of[tokenizer] = cls(backend) if is_level else None
        return cls._of[tokenizer]


class TokenTexts(dict[int, str]):
    """The texts of tokens that begin and end with whole characters; empty for others, and for those without bytes.
    NO_TOKEN has none."""

    def __init__(self, of: TokenBytes) -> None:
        super().__init__()
        self._of = of
        self[NO_TOKEN] = ""

    def __missing__(self, token_id: int) -> str:
        text = self._of[token_id].decode(errors="replace")
        self[token_id] = text = "" if text.endswith(REPLACEMENT) else text
        return text


class Detokenizer:
    """Decodes one sequence incrementally. Without a tokenizer every text is empty.

    Special tokens have no text, apart from `shown_special_ids`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, shown_special_ids: Collection[int] = ()) -> None:
        # transformers takes ten times as long around the same call of the tokenizer.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._options: dict[str, bool] = {"skip_special_tokens": not shown_special_ids}
        if backend is None:
            self._options["clean_up_tokenization_spaces"] = False
        self._tokenizer: Any = backend or tokenizer
        self._hidden_ids: set[int] = set()
        if tokenizer is not None and shown_special_ids:
            added = tokenizer.added_tokens_decoder.items()
            special = {token_id for token_id, token in added if token.special}
            self._hidden_ids = special.difference(shown_special_ids)
        self._bytes = None if tokenizer is None or shown_special_ids else TokenBytes.of(tokenizer)
        # Whether the texts of the next tokens are those of `TokenTexts`.
        self.is_whole = self._bytes is not None
        self._ids: list[int] = []
        # Ids before `_read` have been returned as text. Decoding starts a little before, at `_start`, because some
        # tokenizers place spaces by the preceding token.
        self._start = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is still missing bytes."""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT):
            self.is_whole = False
            if len(self._ids) - self._read <= MAX_INCOMPLETE_TOKENS:
                return ""
            return self._give_up()
        self._start, self._read = self._read, len(self._ids)
        self.is_whole = self._bytes is not None
        return text

    def push_all(self, token_ids: Sequence[int]) -> list[str]:
        """`push` of each."""
        if self._tokenizer is None:
            return [""] * len(token_ids)
        if self._bytes is not None and self.is_whole:
            texts = [*map(self._bytes.texts.__getitem__, token_ids)]
            if all(texts):
                return texts
        return [*map(self.push, token_ids)]

    def flush(self) -> str:
        """The rest of the text, at the end, without a character whose last bytes are missing."""
        text = self._new_text().rstrip(REPLACEMENT)
        self._start, self._read = self._read, len(self._ids)
        return text

    def _give_up(self) -> str:
        """Text with its invalid bytes as U+FFFD, without the last few tokens, which may be the start of a character."""
        before = self._decode(self._ids[self._start : self._read])
        end = len(self._ids) - 3
        text = self._decode(self._ids[self._start : end])[len(before) :]
        self._start, self._read = end, end
        return text

    def _new_text(self) -> str:
        if self._bytes is not None:
            return self._decode(self._ids[self._read :])
        before = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        if self._bytes is not None:
            return b"".join(map(self._bytes.__getitem__, ids)).decode(errors="replace")
        if self._tokenizer is None or not ids:
            return ""
        shown = [token_id for token_id in ids if token_id not in self._hidden_ids]
        return str(self._tokenizer.decode(shown, **self._options))


class StopStrings:
    """Finds the first stop string in a growing text. Holds back text that may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Adds text. Returns (text that may be shown, the stop string that was found or None)."""
        self._held += text
        first, found, num_held = len(self._held), None, 0
        # The shorter one of two that begin at one place was complete first.
        for stop in self._stops:
            start = self._held.find(stop, 0, first + len(stop))
            if start >= 0 and (found is None or start < first or len(stop) < len(found)):
                first, found = start, stop
            for size in range(num_held + 1, min(len(stop), len(self._held) + 1)):
                if self._held.endswith(stop[:size]):
                    num_held = size
        if found is not None:
            shown, self._held = self._held[:first], ""
            return shown, found
        cut = len(self._held) - num_held
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def flush(self) -> str:
        """The text that is still held back, at the end."""
        held, self._held = self._held, ""
        return held
