"""Converts a client's prompt to token ids."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from transformers import PreTrainedTokenizerBase

from shared.blocking import check_wanted
from shared.chat.control_tokens import MARK, encode_behind
from shared.chat.template import Chat, encode_rendered, has_template, render
from shared.errors import InvalidInput, PromptTooLong
from shared.model.loaded import LoadedModel

# No known tokenizer encodes more characters in one token, so a longer text cannot fit and is refused without being
# tokenised.
MAX_CHARACTERS_PER_TOKEN = 64

PROMPTS = "one text, chat messages, or token ids"
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Chat


def encode_prompt(loaded: LoadedModel, prompt: Prompt) -> tuple[int, ...]:
    """Plain text, token ids, chat messages ({"role", "content"}), or a `Chat` -> token ids.

    Raises `InvalidInput` (also with the reasons EMPTY_PROMPT, TOKEN_OUT_OF_RANGE, NO_TOKENIZER, NO_CHAT_TEMPLATE,
    CHAT_TEMPLATE_REFUSED, UNKNOWN_ROLE) and `PromptTooLong`.
    """
    if not isinstance(prompt, str | Chat):
        prompt = _as_list(prompt, "prompt", PROMPTS)
    if not (prompt.messages if isinstance(prompt, Chat) else prompt):
        raise InvalidInput("the prompt is empty", reason="EMPTY_PROMPT")
    if isinstance(prompt, str):
        ids = encode_text(loaded, prompt)
    elif isinstance(prompt, Chat):
        ids = _encode_chat(loaded, prompt)
    elif isinstance(prompt[0], Mapping):
        ids = _encode_chat(loaded, Chat(prompt))
    else:
        ids = _token_ids(prompt, "prompt", PROMPTS)
    check_prompt_ids(loaded, ids)
    return tuple(ids)


def decode_prompt(loaded: LoadedModel, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Its text, without special tokens unless they are wanted. Raises `InvalidInput` (reason NO_TOKENIZER)."""
    if loaded.tokenizer is None:
        raise InvalidInput("this model has no tokenizer, so no text", reason="NO_TOKENIZER")
    return str(
        loaded.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )


def _as_list(given: Any, what: str, forms: str) -> list[Any]:
    """The token ids or messages of what is no text. An array of ids [S] counts as a list."""
    if not isinstance(given, bytes | Mapping) and hasattr(given, "__iter__"):
        listed = given.tolist() if hasattr(given, "tolist") else list(given)
        if isinstance(listed, list):  # an array without dimensions gives none
            return listed
    raise InvalidInput(f"the {what} is of type {type(given).__name__}; it must be {forms}")


def _token_ids(listed: Sequence[Any], what: str, forms: str) -> list[int]:
    try:
        return [index(token) for token in listed]
    except TypeError as error:
        raise InvalidInput(f"the {what} is a list of {type(listed[0]).__name__}; it must be {forms}") from error


def check_prompt_ids(loaded: LoadedModel, ids: Sequence[int]) -> None:
    """Raises `InvalidInput` or `PromptTooLong` for token ids that this model cannot continue."""
    if not ids:
        raise InvalidInput("the prompt has no tokens", reason="EMPTY_PROMPT")
    if len(ids) >= loaded.context_length:
        raise _too_long(f"{len(ids)} tokens", loaded)
    check_token_ids(loaded, ids)


def check_token_ids(loaded: LoadedModel, ids: Sequence[int]) -> None:
    """Raises `InvalidInput` (reason TOKEN_OUT_OF_RANGE) unless all are tokens of this model."""
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= loaded.vocabulary_size:
        raise InvalidInput(
            f"token id {low if low < 0 else high} is outside the vocabulary of {loaded.vocabulary_size}",
            reason="TOKEN_OUT_OF_RANGE",
        )


def encode_text(loaded: LoadedModel, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Text -> token ids, which may be more than the context holds.

    Raises `InvalidInput` (reason NO_TOKENIZER) and `PromptTooLong` for a text that cannot fit into the context.
    """
    encoded = _tokenizer_for(loaded, text)(text, add_special_tokens=add_special_tokens)
    return list(encoded["input_ids"])


def _tokenizer_for(loaded: LoadedModel, text: str) -> PreTrainedTokenizerBase:
    if loaded.tokenizer is None:
        raise InvalidInput("this model has no tokenizer; send token ids", reason="NO_TOKENIZER")
    _check_text(loaded, text)
    return loaded.tokenizer


def encode_bad_word(loaded: LoadedModel, text: str) -> list[tuple[int, ...]]:
    """The token ids of a text within an answer, at the beginning of a word and inside it.

    Raises `InvalidInput` (also with reason NO_TOKENIZER).
    """
    if not text.strip():
        raise InvalidInput(f"one of bad_words is {text!r}; it must be a word")
    word = text.lstrip()
    return [tuple(ids) for ids in encode_behind(_tokenizer_for(loaded, word), [word, f" {word}"])]


def encode_answer(loaded: LoadedModel, text: str) -> list[int]:
    """The token ids of a text as a part of an answer: without the special tokens that begin a prompt.

    Raises `InvalidInput` (reason NO_TOKENIZER) and `PromptTooLong`.
    """
    return encode_text(loaded, text, add_special_tokens=False)


def encode_prediction(loaded: LoadedModel, prediction: str | Sequence[int]) -> tuple[int, ...]:
    """The token ids of what an answer is expected to be like. Raises as `check_prediction`, and `InvalidInput` (reason
    NO_TOKENIZER)."""
    forms = "prediction", "a text or token ids"
    if not isinstance(prediction, str):
        prediction = _as_list(prediction, *forms)
    most = loaded.context_length * (MAX_CHARACTERS_PER_TOKEN if isinstance(prediction, str) else 1)
    if len(prediction) > most:  # before it is tokenised
        raise _prediction_too_long(loaded)
    ids = encode_answer(loaded, prediction) if isinstance(prediction, str) else _token_ids(prediction, *forms)
    check_prediction(loaded, ids)
    return tuple(ids)


def check_prediction(loaded: LoadedModel, ids: Sequence[int]) -> None:
    """Raises `InvalidInput` (reasons PREDICTION_TOO_LONG, TOKEN_OUT_OF_RANGE)."""
    if len(ids) > loaded.context_length:
        raise _prediction_too_long(loaded)
    check_token_ids(loaded, ids)


def _prediction_too_long(loaded: LoadedModel) -> InvalidInput:
    return InvalidInput(
        f"the prediction has more tokens than {loaded.model_id} holds: {loaded.context_length}",
        reason="PREDICTION_TOO_LONG",
        metadata={"context_length": str(loaded.context_length)},
    )


def _encode_chat(loaded: LoadedModel, chat: Chat) -> list[int]:
    if loaded.tokenizer is None or not has_template(loaded.tokenizer):
        raise InvalidInput("this model has no chat template; send text or token ids", reason="NO_CHAT_TEMPLATE")
    check_pieces(loaded, len(chat.messages), "messages")
    _check_characters(loaded, chat.num_characters)
    text = render(loaded.tokenizer, chat)
    check_wanted()
    check_pieces(loaded, text.count(MARK), "control tokens as text")
    _check_text(loaded, text)
    return encode_rendered(loaded.tokenizer, text)


def check_pieces(loaded: LoadedModel, num_pieces: int, what: str) -> None:
    """Raises `PromptTooLong` for more pieces than the context has tokens, if each has at least one."""
    if num_pieces >= loaded.context_length:
        raise _too_long(f"{num_pieces} {what}", loaded)


def _check_characters(loaded: LoadedModel, num_characters: int) -> None:
    if num_characters > loaded.context_length * MAX_CHARACTERS_PER_TOKEN:
        raise _too_long(f"{num_characters} characters", loaded)


def _check_text(loaded: LoadedModel, text: str) -> None:
    """Before it is tokenised."""
    _check_characters(loaded, len(text))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"character {error.start} of the text is half of a surrogate pair", reason="NOT_UNICODE"
        ) from error


def _too_long(size: str, loaded: LoadedModel) -> PromptTooLong:
    return PromptTooLong(
        f"the prompt has {size}; {loaded.model_id} holds {loaded.context_length} tokens, prompt and completion "
        "together",
        metadata={"context_length": str(loaded.context_length)},
    )
