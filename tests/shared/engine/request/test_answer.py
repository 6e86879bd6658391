"""The text and the end of an answer, whole and continued."""

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shared.engine.request.answer import DecodedAnswer, Detokenizer, StopStrings, TokenBytes
from shared.engine.request.request import FinishReason, GenerationRequest, StoppingParams
from shared.model.sampling import SamplingParams

EOS = 0


def answer(tokenizer: Any, tokens: tuple[int, ...] = (), min_tokens: int = 0, **stopping: Any) -> DecodedAnswer:
    loaded: Any = SimpleNamespace(context_length=200, tokenizer=tokenizer, eos_token_ids=frozenset({EOS}))
    request = GenerationRequest(
        (1, 2), resumed_ids=tokens, stopping=StoppingParams(**stopping), sampling=SamplingParams(min_tokens=min_tokens)
    )
    return DecodedAnswer(request, loaded)


def through(one: DecodedAnswer, tokens: list[int]) -> tuple[list[str | None], Any, str]:
    """The pieces of text up to the end, the end, and the rest of the text."""
    pieces = []
    for token in tokens:
        if one.end is not None:
            break
        pieces += one.push([token])
    if one.end is None:
        return pieces, None, ""
    rest = one.rest()
    return pieces, one.end, rest


@pytest.mark.parametrize("seed", range(40))
def test_a_continued_answer_has_the_pieces_of_a_whole_one(bytes_tokenizer, seed):
    """Characters and stop strings cross the seam."""
    draw = random.Random(seed)
    text = "".join(draw.choice(["a", "ab", "é", "漢", "🙂", " x"]) for _ in range(12))
    tokens = [*bytes_tokenizer(text)["input_ids"], EOS]
    stopping = {
        "stop_strings": draw.choice([(), ("ab é",), ("🙂a", "漢漢"), (text[-3:] + "b",)]),
        "max_tokens": draw.choice([None, len(tokens) // 2]),
    }
    whole, end, rest = through(answer(bytes_tokenizer, **stopping), tokens)
    assert end is not None
    for cut in range(len(whole) + 1):
        assert through(answer(bytes_tokenizer, tuple(tokens[:cut]), **stopping), tokens[cut:]) == (
            whole[cut:],
            end,
            rest,
        )


def test_a_stop_token_has_no_text(bytes_tokenizer):
    one = answer(bytes_tokenizer, stop_token_ids=frozenset({7}))
    assert one.push([9, 7, 9]) == ["*"]
    assert one.end == (FinishReason.STOP_TOKEN, "7")


def test_a_stop_string_has_no_text_of_the_first_min_tokens(bytes_tokenizer):
    tokens = bytes_tokenizer("abababab")["input_ids"]
    for least, expected in ((0, "a"), (1, "a"), (2, "aba"), (3, "aba"), (7, "abababa")):
        for cut in range(least + 1):  # the caller may have some of them
            one = answer(bytes_tokenizer, tuple(tokens[:cut]), least, stop_strings=("ba",))
            pieces, _, _ = through(one, tokens[cut:])
            assert "abababab"[:cut] + "".join(map(str, pieces)) == expected


@pytest.fixture(scope="module")
def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that every character beyond ASCII is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_pieces_never_split_a_character_and_add_up(bytes_tokenizer) -> None:
    text = "Zoë ate 3 🥐🥐 in 東京 — ok"
    detokenizer = Detokenizer(bytes_tokenizer)
    pieces = [detokenizer.push(token) for token in bytes_tokenizer(text)["input_ids"]]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("seed", range(20))
def test_texts_are_those_that_the_tokenizer_makes_of_tokens(bytes_tokenizer, monkeypatch, seed):
    """Of any bytes, of tokens that were added as they are, special or not, and of numbers that are no tokens."""
    tokenizer = copy.deepcopy(bytes_tokenizer)
    tokenizer.add_tokens(["plain text", "é€", "Ġ", "東"])
    tokenizer.add_special_tokens({"eos_token": "<end>", "additional_special_tokens": ["é!"]})
    draw = random.Random(seed)
    tokens = draw.choices([*range(len(tokenizer) + 2), *[*range(256, len(tokenizer))] * 10], k=200)
    fast = Detokenizer(tokenizer)
    texts = [*map(fast.push, tokens), fast.flush()]
    monkeypatch.setattr(TokenBytes, "of", lambda tokenizer: None)
    usual = Detokenizer(tokenizer)
    assert texts == [*map(usual.push, tokens), usual.flush()]


@pytest.fixture(scope="module")
def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, as sentencepiece has them for characters that it does not know, and one per letter."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [chr(byte) for byte in range(32, 127)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate([*names, *letters])}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("kind", ["bytes_tokenizer", "fallback_tokenizer"])
@pytest.mark.parametrize("text", ["ab🥐", "é", "a漢漢", "🥐🥐x🥐"])
def test_a_text_that_is_cut_inside_a_character_ends_before_it(kind, text, request) -> None:
    tokenizer = request.getfixturevalue(kind)
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    for size in range(len(tokens) + 1):
        detokenizer = Detokenizer(tokenizer)
        shown = "".join(detokenizer.push(token) for token in tokens[:size]) + detokenizer.flush()
        assert shown == text.encode()[:size].decode(errors="ignore")


def test_an_endless_run_of_broken_bytes_does_not_hold_the_text_back(bytes_tokenizer) -> None:
    continuation = bytes_tokenizer("🥐")["input_ids"][1]
    detokenizer = Detokenizer(bytes_tokenizer)
    shown = "".join(detokenizer.push(continuation) for _ in range(40))
    assert len(shown) >= 25
    assert set(shown) == {"\ufffd"}
    croissant = bytes_tokenizer("🥐!")["input_ids"]
    assert "".join(detokenizer.push(token) for token in croissant).endswith("🥐!")


@pytest.mark.parametrize(
    ("pieces", "shown", "found"),
    [
        (["one ST", "OP two"], "one ", "STOP"),
        (["one S", "T", "O", "x"], "one STOx", None),
        (["a##", "#b"], "a", "###"),
        (["xENDSTOP"], "x", "END"),
        (["S", "S", "STOP"], "SS", "STOP"),
    ],
)
def test_stop_strings_over_pieces(pieces: list[str], shown: str, found: str | None) -> None:
    stops = StopStrings(["STOP", "END", "###"])
    text = ""
    for piece in pieces:
        new, match = stops.push(piece)
        text += new
        if match:
            break
    if match is None:
        text += stops.flush()
    assert (text, match) == (shown, found)


def test_a_possible_start_of_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["STOP"])
    assert stops.push("go ST") == ("go ", None)
    assert stops.flush() == "ST"
