"""The endpoints that tokenise, in the forms in which vLLM's clients and lm-eval use them."""

import pytest

from tests.gateways import gateway_to
from tests.worker import CHAT_TEMPLATE, CONTEXT_LENGTH, EOS, build_tokenizer

TEXT = "hello the<eos> \u00e9"


def posted(gateway, path, **body):
    reply = gateway.http.post(path, json=body)
    return reply.status_code, reply.json()


@pytest.mark.parametrize("model", [{"model": "tiny"}, {}])
@pytest.mark.parametrize("with_texts", [True, False])
def test_a_text_becomes_tokens_and_these_the_text(gateway, model, with_texts):
    ids = build_tokenizer()(TEXT).input_ids
    asked = {"prompt": TEXT, "add_special_tokens": False, "return_token_strs": with_texts}
    status, found = posted(gateway, "/tokenize", **model, **asked)
    assert (status, found["tokens"], found["count"]) == (200, ids, len(ids))
    assert found["max_model_len"] == CONTEXT_LENGTH
    assert (found["token_strs"] or [])[:2] == (["hello", " "] if with_texts else [])
    assert posted(gateway, "/detokenize", **model, tokens=ids) == (200, {"prompt": TEXT})
    assert posted(gateway, "/tokenize", prompt="")[1]["tokens"] == []
    assert posted(gateway, "/detokenize", tokens=[]) == (200, {"prompt": ""})


def test_more_tokens_than_the_context_has_are_counted(gateway):
    status, found = posted(gateway, "/tokenize", prompt="z" * 2 * CONTEXT_LENGTH)
    assert (status, found["count"]) == (200, 2 * CONTEXT_LENGTH)
    status, found = posted(gateway, "/tokenize", prompt="z" * 65 * CONTEXT_LENGTH)
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")


def test_tokens_that_take_more_than_half_of_the_bytes_are_refused(worker):
    with gateway_to(worker.target, body_budget_mb=2, max_body_mb=1) as small:
        status, found = posted(small, "/tokenize", prompt="z" * 15 * CONTEXT_LENGTH)
        assert (status, found["error"]["code"]) == (400, "answer_too_large")
        assert posted(small, "/tokenize", prompt="z" * 8 * CONTEXT_LENGTH)[0] == 200


def test_a_chat_has_the_tokens_of_its_prompt(gateway, client):
    messages = [{"role": "user", "content": "hello"}]
    status, found = posted(gateway, "/tokenize", model="tiny", messages=messages, add_generation_prompt=True)
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert (status, found["count"]) == (200, answer.usage.prompt_tokens)


def test_a_tokenizer_says_its_special_tokens_and_its_template(gateway):
    for path in ("/tokenizer_info", "/tokenizer_info?model=tiny"):
        found = gateway.http.get(path).json()
        assert (found["eos_token"], found["chat_template"]) == ("<eos>", CHAT_TEMPLATE)
        assert isinstance(found["tokenizer_class"], str)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/tokenize", {}, 400, "invalid_input"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "invalid_input"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, 400, "unsupported_field"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_input"),
        ("/detokenize", {}, 400, "invalid_input"),
        ("/detokenize", {"tokens": [EOS + 10_000]}, 400, "token_out_of_range"),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_input"),
    ],
    ids=str,
)
def test_what_cannot_be_tokenised_is_refused(gateway, path, body, status, code):
    found = posted(gateway, path, **body)
    assert (found[0], found[1]["error"]["code"]) == (status, code)
