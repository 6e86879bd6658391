"""The text and the end of an answer, whole and continued."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from shared.engine.request.answer import DecodedAnswer
from shared.engine.request.request import FinishReason, GenerationRequest, StoppingParams
from shared.model.sampling import SamplingParams
from tests.shared.engine.request.test_text import bytes_tokenizer

__all__ = ["bytes_tokenizer"]

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
        pieces.append(one.push(token))
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
    assert one.push(9) is not None
    assert one.push(7) is None
    assert one.end == (FinishReason.STOP_TOKEN, "7")


def test_a_stop_string_has_no_text_of_the_first_min_tokens(bytes_tokenizer):
    tokens = bytes_tokenizer("abababab")["input_ids"]
    for least, expected in ((0, "a"), (1, "a"), (2, "aba"), (3, "aba"), (7, "abababa")):
        for cut in range(least + 1):  # the caller may have some of them
            one = answer(bytes_tokenizer, tuple(tokens[:cut]), least, stop_strings=("ba",))
            pieces, _, _ = through(one, tokens[cut:])
            assert "abababab"[:cut] + "".join(map(str, pieces)) == expected
