"""Texts of single tokens are those that they have within a text."""

import pytest
from neap_client.inference.v1 import inference_pb2 as pb
from transformers import LlamaTokenizer

from inference_service.tokenization import token_texts, tokenized
from shared.errors import InvalidInput
from tests.worker import CONTEXT_LENGTH, build_tokenizer

PIECES = ["<unk>", "<s>", "</s>", "▁", "a", "t", "h", "e", "▁t", "he", "▁the", "▁a", "<0xE2>", "<0x41>"]
MERGES = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a")]


@pytest.fixture(scope="module")
def sentencepiece():
    return LlamaTokenizer(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=MERGES)


@pytest.mark.parametrize(
    ("piece", "text"),
    [("▁the", " the"), ("he", "he"), ("▁", " "), ("▁a", " a"), ("<0xE2>", "\ufffd"), ("<0x41>", "A"), ("</s>", "</s>")],
)
def test_tokens_of_sentencepiece_keep_their_blank(sentencepiece, piece, text):
    assert token_texts(sentencepiece)(PIECES.index(piece)) == text


def test_texts_of_tokens_are_the_text():
    tokenizer = build_tokenizer()
    text_of = token_texts(tokenizer)
    assert "".join(map(text_of, tokenizer(" hello the<eos>").input_ids)) == " hello the<eos>"
    assert token_texts(None)(5) == ""


@pytest.mark.parametrize("content", [{"token_ids": pb.TokenIds(ids=[1] * (4 * CONTEXT_LENGTH + 1))}])
def test_more_ids_than_four_contexts_have_no_text(loaded, content):
    with pytest.raises(InvalidInput, match=str(4 * CONTEXT_LENGTH + 1)):
        tokenized(pb.TokenizeRequest(**content), loaded, str, chats_have_control_tokens=False)
