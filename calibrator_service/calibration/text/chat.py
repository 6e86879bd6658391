"""How a model's prompts are written: with its chat template, or as plain text if it has none."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from shared.engine.request.answer import REPLACEMENT
from shared.model.loaded import LoadedModel

SENTINEL = "NEAPSENTINEL"
# (role, text) pairs.
Messages = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class UserTurn:
    """A user's turn in the chat template: it begins after the token ids `opening`, and a token of `stop_ids` ends
    it."""

    opening: tuple[int, ...]
    stop_ids: frozenset[int]


class PromptFormat:
    """Encodes the prompts of one model and decodes its answers.
    Only `first_token` works for a model without a tokenizer."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._vocabulary_size = loaded.vocabulary_size
        self._tokenizer = tokenizer = loaded.tokenizer
        self.has_chat_template = tokenizer is not None and bool(tokenizer.chat_template)
        self.user_turn: UserTurn | None = None
        if self.has_chat_template:
            assert tokenizer is not None
            self.user_turn = find_user_turn(tokenizer, loaded.eos_token_ids)

    def encode(self, messages: Messages) -> list[int]:
        """Token ids up to where the assistant begins to answer; without a chat template those of the last message's
        text.

        Plain text gets the special tokens that the tokenizer puts around it, as on a worker.
        """
        tokenizer = self._tokenizer
        assert tokenizer is not None
        if self.has_chat_template:
            return encode_rendered(tokenizer, render(tokenizer, messages))
        ids: list[int] = tokenizer(messages[-1][1])["input_ids"]
        return ids

    def encode_user(self, text: str) -> list[int]:
        """Token ids of a conversation with a single user's message."""
        return self.encode([("user", text)])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without special tokens and surrounding space."""
        assert self._tokenizer is not None
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str)
        return text.rstrip(REPLACEMENT).strip()  # it may be cut inside a character

    def first_token(self, rng: random.Random) -> int:
        """The token that starts a text without a prompt: the beginning-of-sequence token, else one drawn at random."""
        if self._tokenizer is not None and isinstance(self._tokenizer.bos_token_id, int):
            return self._tokenizer.bos_token_id
        return rng.randrange(self._vocabulary_size)


def find_user_turn(tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int]) -> UserTurn | None:
    """How a user's turn begins and ends (Magpie, 2406.08464).
    None if the template does not keep the user's text in one piece."""
    opening, separator, ending = render(tokenizer, [("user", SENTINEL)]).partition(SENTINEL)
    opening_ids = encode_rendered(tokenizer, opening)
    if not separator or not opening_ids:
        return None
    after = encode_rendered(tokenizer, ending)
    # Templates without an end marker continue with an ordinary word, which must not end every turn that contains it.
    special = frozenset(after[:1]) & frozenset(tokenizer.all_special_ids)
    return UserTurn(tuple(opening_ids), eos_token_ids | special)


def encode_rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered template, which contains its special tokens already."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    """The chat template's text, up to where the assistant begins to answer."""
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in messages], add_generation_prompt=True, tokenize=False
    )
    assert isinstance(rendered, str)
    return rendered
