"""Answers Tokenize, and describes tokenizers."""

from collections.abc import Callable
from functools import cache

from neap_client.inference.v1 import inference_pb2 as pb
from transformers import PreTrainedTokenizerBase

from inference_service.chat import PreparedChat
from shared.engine.request.prompt import check_token_ids, decode_prompt, encode_prompt, encode_text
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

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


# The token ids of a request for their text, in contexts of the model.
MOST_CONTEXTS = 4


def tokenized(
    request: pb.TokenizeRequest, loaded: LoadedModel, text_of: Callable[[int], str], *, chats_have_control_tokens: bool
) -> pb.TokenizeResponse:
    """Blocks while it tokenises. Raises InvalidInput and PromptTooLong as for the prompt of a generation."""
    response = pb.TokenizeResponse(context_length=loaded.context_length)
    match request.WhichOneof("content"):
        case "text":
            ids = encode_text(loaded, request.text, add_special_tokens=not request.without_special_tokens)
        case "chat":
            chat = PreparedChat(request.chat, loaded, has_control_tokens=chats_have_control_tokens)
            ids = list(encode_prompt(loaded, chat.prompt))
        case "token_ids":
            num_ids = len(request.token_ids.ids)
            if num_ids > MOST_CONTEXTS * loaded.context_length:  # before millions become Python integers
                most = MOST_CONTEXTS * loaded.context_length
                raise InvalidInput(f"there are {num_ids} token ids; at most {most} are turned into text at once")
            ids = list(request.token_ids.ids)
            check_token_ids(loaded, ids)
            response.text = decode_prompt(loaded, ids, skip_special_tokens=False)
        case _:
            raise InvalidInput("there is no text, no chat and no token ids", reason="EMPTY_PROMPT")
    response.token_ids.extend(ids)
    if request.with_token_texts:
        response.token_texts.extend(map(text_of, ids))
    return response


def described(loaded: LoadedModel) -> pb.Tokenizer | None:
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        return None
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    template = tokenizer.chat_template
    return pb.Tokenizer(
        class_name=type(tokenizer).__name__,
        special_tokens=named,
        chat_template=template if isinstance(template, str) else "",
    )
