"""The text of single tokens, which log-probabilities carry."""

from collections.abc import Callable
from functools import cache

from transformers import PreTrainedTokenizerBase

# Before a token, because some tokenizers drop a blank at the beginning of a text.
BEFORE = "a"


def token_texts(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[int], str]:
    """A function that decodes one token, as it is within a text, and remembers the results, at most one for each token
    of the vocabulary.

    Special tokens keep their names. Without a tokenizer every text is empty.
    """
    if tokenizer is None:
        return lambda token_id: ""
    known = tokenizer

    def decode(ids: list[int]) -> str:
        return str(known.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    before = known.encode(BEFORE, add_special_tokens=False)
    shown = decode(before)

    @cache
    def text_of(token_id: int) -> str:
        text = decode([*before, token_id])
        # A tokenizer that cannot write the text before has no blanks to lose.
        return text[len(shown) :] if shown and text.startswith(shown) else decode([token_id])

    return text_of
