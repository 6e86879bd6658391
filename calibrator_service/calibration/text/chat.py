"""The model's own chat template: rendering prompts, and finding how a user's turn opens (Magpie, 2406.08464)."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

SENTINEL = "NEAPSENTINEL"


@dataclass(frozen=True)
class UserTurn:
    """`opening` token ids after which the user speaks; `stop_ids` are what may end the turn."""

    opening: tuple[int, ...]
    stop_ids: frozenset[int]


def has_chat_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    return tokenizer is not None and bool(tokenizer.chat_template)


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]]
) -> list[int]:
    """(role, text) pairs -> token ids up to where the assistant begins to answer."""
    return encode(tokenizer, _render(tokenizer, messages))


def user_turn(tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int]) -> UserTurn | None:
    """How a user's turn begins and ends, found by rendering a sentinel; None where the template does not keep it whole."""
    rendered = _render(tokenizer, [("user", SENTINEL)])
    opening, found, ending = rendered.partition(SENTINEL)
    opening_ids = encode(tokenizer, opening)
    if not found or not opening_ids:
        return None
    after = encode(tokenizer, ending)
    # A word after the user's text (some templates have no marker) must not end every turn that holds it.
    special = frozenset(after[:1]) & frozenset(tokenizer.all_special_ids)
    return UserTurn(tuple(opening_ids), eos_token_ids | special)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered text, which holds its special tokens already."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of plain text as a worker reads it: with the special tokens that the tokenizer puts around a text."""
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]]) -> str:
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in messages],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert isinstance(rendered, str)
    return rendered
