"""Log-probabilities of answers and prompts, as the `openai` package gets them."""

import openai
import pytest
from neap_client.inference.v1 import inference_pb2 as pb

from neap_engine.gateway.answers import text_logprobs
from tests.worker import build_tokenizer

GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_logprobs_of_a_chat_have_texts_and_bytes(client):
    answer = client.chat.completions.create(
        **GREEDY, messages=[{"role": "user", "content": "hello"}], max_tokens=6, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 6
    for token in content:
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
        assert token.token == token.top_logprobs[0].token
        assert len(token.top_logprobs) == 2
        if token.bytes is not None:
            assert bytes(token.bytes).decode() == token.token


def test_logprobs_of_a_completion_have_the_older_form(client):
    answer = client.completions.create(**GREEDY, prompt="hello", max_tokens=5, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5
    assert all(len(top) == 1 for top in logprobs.top_logprobs)
    assert logprobs.text_offset[0] == 0


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "token ids"])
def test_a_prompt_is_echoed_with_its_logprobs(client, is_text):
    text = "hello é😀 thin hello " * 20
    ids = build_tokenizer()(text).input_ids
    prompt = text if is_text else ids
    plain = client.completions.create(**GREEDY, prompt=prompt, max_tokens=5, logprobs=2)
    alone = client.completions.create(**GREEDY, prompt=prompt, max_tokens=5, echo=True)
    assert alone.choices[0].text == text + plain.choices[0].text
    assert alone.choices[0].logprobs is None
    found = client.completions.create(**GREEDY, prompt=prompt, max_tokens=5, echo=True, logprobs=2)
    assert found.choices[0].text == alone.choices[0].text
    assert found.usage.completion_tokens == 5
    own, answer = found.choices[0].logprobs, plain.choices[0].logprobs
    assert len(own.tokens) == len(own.token_logprobs) == len(own.top_logprobs) == len(ids) + 5
    assert (own.token_logprobs[0], own.top_logprobs[0]) == (None, None)
    assert all(value <= 0 for value in own.token_logprobs[1:])
    assert own.tokens[-5:] == answer.tokens
    # This model does not run on neap's kernels, so bits depend on the pass.
    assert own.token_logprobs[-5:] == pytest.approx(answer.token_logprobs, abs=1e-4)
    assert [own.text_offset[0], own.text_offset[len(ids)]] == [0, len(text)]
    full = client.completions.create(
        **{**GREEDY, "extra_body": {"ignore_eos": True, "neap": {"policy": "full"}}},
        prompt=prompt, max_tokens=5, echo=True, logprobs=2,
    )  # fmt: skip
    assert full.choices[0].logprobs.tokens == own.tokens
    assert full.choices[0].logprobs.token_logprobs[1:] == pytest.approx(own.token_logprobs[1:], abs=1e-4)
    chunks = [
        chunk.choices[0]
        for chunk in client.completions.create(
            **GREEDY, prompt=prompt, max_tokens=5, echo=True, logprobs=2, stream=True
        )
    ]
    assert "".join(chunk.text for chunk in chunks) == found.choices[0].text
    tokens = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens]
    assert tokens == own.tokens


def test_choices_that_share_an_echoed_prompt_have_it_each(client):
    answer = client.completions.create(
        model="tiny", prompt="hello", n=2, seed=5, max_tokens=3, temperature=2.0, echo=True, logprobs=0
    )
    for choice in answer.choices:
        assert choice.text.startswith("hello")
        assert len(choice.logprobs.tokens) == len(build_tokenizer()("hello").input_ids) + 3


def test_a_prompt_is_scored_and_nothing_generated(client):
    text = "hello é😀 thin hello " * 20
    asked = {"model": "tiny", "prompt": [text, "thin"], "echo": True, "logprobs": 2}
    longer = client.completions.create(**asked, max_tokens=1)
    found = client.completions.create(**asked, max_tokens=0)
    assert [choice.text for choice in found.choices] == [text, "thin"]
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (0, "length")
    for own, other in zip(found.choices, longer.choices, strict=True):
        assert own.logprobs.tokens == other.logprobs.tokens[:-1]
        expected = pytest.approx(other.logprobs.token_logprobs[1:-1], abs=1e-4)
        assert own.logprobs.token_logprobs[1:] == expected
    chunks = list(client.completions.create(**{**asked, "prompt": text}, max_tokens=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [t for p in parts if p for t in p.tokens] == found.choices[0].logprobs.tokens
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(
            **{**GREEDY, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 0}
        )


def token(text, logprob=None, **others):
    alternatives = [pb.Alternative(text=other.replace("_", " "), logprob=value) for other, value in others.items()]
    return pb.Token(text=text, logprob=logprob, alternatives=alternatives)


@pytest.mark.parametrize(
    ("chosen", "top"),
    [
        (token("a", -1.0, a=-1.0, b=-2.0), {"a": -1.0, "b": -2.0}),
        (token("z", -9.0, a=-1.0, b=-2.0), {"a": -1.0, "b": -2.0, "z": -9.0}),
        (token("z", -9.0), {"z": -9.0}),
        # Two tokens with one text: the better one stays, wherever it stands.
        (token("a", -9.0, a=-1.0), {"a": -1.0}),
        (token("a", -1.0, a=-9.0), {"a": -1.0}),
    ],
)
def test_the_chosen_token_and_the_best_of_each_text_are_there(chosen, top):
    logprobs, _ = text_logprobs([chosen], 0)
    assert logprobs["top_logprobs"] == [top]
    assert logprobs["token_logprobs"] == [chosen.logprob]


def test_offsets_of_a_prompt_are_those_of_its_text():
    """Special tokens, the blank before a text, and parts of characters are not in it."""
    texts = ["<s>", " he", "llo", "\ufffd", "\ufffd", " wor", "ld", "</s>", " x"]
    first, offset = text_logprobs([token(text) for text in texts[:5]], 0, "hello\u00e9 world x")
    rest, offset = text_logprobs([token(text) for text in texts[5:]], offset, "hello\u00e9 world x")
    assert first["text_offset"] == [0, 0, 2, 5, 5]
    assert rest["text_offset"] == [5, 10, 12, 12]
    assert offset == 14
