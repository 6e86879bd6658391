"""The text of single tokens, which log-probabilities carry."""

from collections.abc import Callable
from functools import cache

from transformers import PreTrainedTokenizerBase


def token_texts(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[int], str]:
    """A function that decodes one token and remembers the results, at most one for each token of the vocabulary.

    Special tokens keep their names. Without a tokenizer every text is empty.
    """

    @cache
    def text_of(token_id: int) -> str:
        if tokenizer is None:
            return ""
        return str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return text_of
