"""Log-probabilities in OpenAI's two forms: that of completions and that of chats."""

from collections.abc import Sequence
from typing import Any

from neap_client.inference.v1 import inference_pb2 as pb

REPLACEMENT = "\ufffd"
# A character has at most four bytes, and each may be a token.
MAX_SKIPPED = 4


def text_logprobs(tokens: Sequence[pb.Token], offset: int, text: str | None = None) -> tuple[dict[str, Any], int]:
    """The log-probabilities of tokens of a completion, and where its text goes on after them.

    The tokens begin at `offset` of `text`, which is that of a prompt; None: at `offset`, one after the other. The first
    token of a prompt has no log-probability.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset = offset + len(token.text) if text is None else _after(text, offset, token.text)
    logprobs = {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob if token.HasField("logprob") else None for token in tokens],
        "top_logprobs": [_by_text(token) if token.HasField("logprob") else None for token in tokens],
        "text_offset": offsets,
    }
    return logprobs, offset


def chat_logprobs(tokens: Sequence[pb.Token]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_entry(token.text, token.logprob),
                "top_logprobs": [_entry(other.text, other.logprob) for other in token.alternatives],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _by_text(token: pb.Token) -> dict[str, float]:
    """The alternatives and the token itself. Of tokens with the same text the most probable one."""
    found: dict[str, float] = {}
    for text, logprob in [*((other.text, other.logprob) for other in token.alternatives), (token.text, token.logprob)]:
        found[text] = max(logprob, found.get(text, logprob))
    return found


def _after(text: str, offset: int, token: str) -> int:
    """Where `text` goes on after a token. Special tokens and parts of characters take nothing of it. The first token
    may have a blank that the text has not."""
    for shown in (token, token.removeprefix(" ")):
        begin = text.find(shown, offset, offset + len(shown) + MAX_SKIPPED)
        if begin >= 0 and REPLACEMENT not in shown:
            return begin + len(shown)
    return offset


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # The bytes of a part of a character are not known here.
    encoded = None if REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": encoded}
