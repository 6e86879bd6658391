import pytest

from neap_engine.evaluate.prompts import read_prompts
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel, wrap_model
from tests.reasons import raises
from tests.worker import build_model, build_tokenizer


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build_model(), build_tokenizer())


def test_a_prompt_is_text_or_a_chat(loaded, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n\n{"messages": [{"role": "user", "content": "hello"}], "id": 7}\n')
    text, chat = read_prompts(path, loaded)
    decode = loaded.tokenizer.decode
    assert decode(text) == "hello"
    assert decode(chat) == "user: hello\nassistant:"


@pytest.mark.parametrize(
    "line",
    [
        "hello",
        '"hello"',
        "{}",
        '{"prompt": 3}',
        '{"prompt": "a", "messages": []}',
        '{"messages": ["hello"]}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": 3}]}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:40],
)
def test_a_bad_line_is_named(loaded, tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n' + line + "\n")
    with raises(InvalidInput, "BAD_PROMPT_FILE", match=r"prompts.jsonl:2: "):
        read_prompts(path, loaded)


def test_what_the_model_refuses_is_named_by_its_line(loaded, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": ""}\n')
    with raises(InvalidInput, "EMPTY_PROMPT", match=r"prompts.jsonl:1: "):
        read_prompts(path, loaded)


def test_a_file_without_prompts(loaded, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidInput, match="has no prompts"):
        read_prompts(tmp_path / "empty.jsonl", loaded)
