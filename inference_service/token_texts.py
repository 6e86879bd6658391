"""The text of single tokens, which log-probabilities carry."""

from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """Decodes tokens one by one and remembers the results, at most one for each token of the vocabulary.
    For one thread.

    Special tokens keep their names. Without a tokenizer every text is empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decode(token_id)
        return text

    def _decode(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
