"""A tokenizer splits text as its vocabulary was learnt, and an answer ends where the file says."""

from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Regex, pre_tokenizers
from transformers import LlamaTokenizer

from shared.errors import UnsupportedModel
from shared.model.load import load_model
from shared.model.remembered.facts import Facts
from shared.model.weights.gguf_file import Field, GgufContents
from shared.model.weights.gguf_tokenizer import SPLITS, remembered_merges, split_as_the_file_says
from shared.model.weights.reading import replaced
from tests.gguf_files import write_llama

try:
    from transformers.integrations.gguf import gguf_tokenizer_mapping
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
except ImportError:  # an older version of transformers
    gguf_tokenizer_mapping, GGUF_PRE_TOKENIZER_SPLITS = None, {}

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


# As in tokenizer.json of a model that has the vocabulary.
ORIGINALS = {
    "smollm": [DIGITS, GPT2],
    "starcoder": [DIGITS, GPT2],
    "command-r": [DIGITS, GPT2],
    "refact": [DIGITS, GPT2],
    "gpt-2": [GPT2],
    "olmo": [GPT2],
    "falcon": [pre_tokenizers.Punctuation("contiguous"), GPT2, split("[0-9][0-9][0-9]")],
    "deepseek-coder": [
        *map(split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")),
        DIGITS,
        BYTES,
    ],
    "viking": [split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), DIGITS, BYTES],
    "bloom": [split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), BYTES],
    **{name: [split(pattern), BYTES] for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items() if name in SPLITS},
}
WORDS = (
    *("x = 12", "a  12", "Total:    42", "2024-01-02", "1,234,567.89", "٣٤٥ १२३ ½ ² Ⅷ", "0x1F 3e8 1_000"),
    *("I'm you'LL We'VE don't 'tis", "CamelCaseHTTPServer iPhone", "naïve e\u0301 ﬁ Ωmega", "नमस्ते दुनिया বাংলা"),
    *("日本語テキスト123 中文，标点。", "한국어 텍스트", "עברית مرحبا", "🙂👩‍👩‍👧 !!", "x^2+y_2=~3 `code` $5 |a|"),
    *("#include <a.h>", "def f(x):", '{"a":   123,}', "\u00a0x\u3000y", "<|im_start|>"),
)
GAPS = ("", " ", "   ", "\n", "\r\n  ", "\n\n3\t7  ")
TEXTS = [gap + word + gap + other for gap in GAPS for word, other in zip(WORDS, WORDS[::-1], strict=True)]


def pieces(pre_tokenizer: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_hundred_hard_texts_are_split_as_by_the_models_own_tokenizer(name: str) -> None:
    original = pre_tokenizers.Sequence(ORIGINALS[name])
    ours = pre_tokenizers.Sequence([*map(split, SPLITS[name]), BYTES])
    assert [pieces(ours, text) for text in TEXTS] == [pieces(original, text) for text in TEXTS]


@pytest.mark.parametrize("name", SPLITS)
def test_no_split_loses_text(name: str) -> None:
    ours = pre_tokenizers.Sequence([*map(split, SPLITS[name]), BYTES])
    for text in TEXTS:
        whole = "".join(pieces(BYTES, text))
        assert "".join(pieces(ours, text)) == whole


def written(path: Path, *, pre: str | None = None, ends: dict[str, TokenType] | None = None, **ids: int) -> Path:
    """A file whose tokenizer has the tokens `ends` besides, from id 259 on, and these ids of special tokens."""

    def add_more(writer: GGUFWriter) -> None:
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        for name, token in ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)

    return write_llama(path, add_more=add_more, more_tokens=ends or {})


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [("smollm", ["Ġ", "1", "2"]), ("qwen2", ["Ġ", "1", "2"]), ("gpt-2", ["Ġ12"]), (None, ["Ġ12"])],
)
def test_a_file_is_split_as_it_says(tmp_path: Path, pre: str | None, tokens: list[str]) -> None:
    file = written(tmp_path / "tiny.gguf", pre=pre)
    loaded = load_model(file)
    backend = loaded.tokenizer.backend_tokenizer
    assert pieces(backend.pre_tokenizer, " 12") == tokens
    assert not backend.model.ignore_merges


def test_a_token_is_taken_whole_where_the_vocabulary_says_so(tmp_path: Path) -> None:
    """Merges would not reach it."""
    ends = {"elo": TokenType.NORMAL}
    for pre, tokens in (("llama-bpe", ["elo"]), ("qwen2", ["e", "l", "o"])):
        loaded = load_model(written(tmp_path / f"{pre}.gguf", pre=pre, ends=ends))
        assert loaded.tokenizer.convert_ids_to_tokens(loaded.tokenizer("elo")["input_ids"]) == tokens


def test_a_name_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load_model(written(tmp_path / "tiny.gguf", pre="kimi-k2"))
    assert caught.value.reason == "TOKENIZER_UNKNOWN"
    assert "kimi-k2" in caught.value.message


@pytest.mark.parametrize(
    ("stated", "tokens", "text"),
    [(None, ["▁a", "▁a"], "a a"), (True, ["▁a", "▁a"], "a a"), (False, ["a", "▁a"], "a a")],
)
def test_a_blank_is_put_before_a_text_where_the_file_says_so(stated: bool | None, tokens: list[str], text: str) -> None:
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "▁a"])}
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=[("▁", "a")])
    fields = {"tokenizer.ggml.model": Field(["llama"], [])}
    if stated is not None:
        fields["tokenizer.ggml.add_space_prefix"] = Field([stated], [])
    split_as_the_file_says(tokenizer, GgufContents(Path("tiny.gguf"), fields, (), b"", 0))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids) == text


CONTROL, NORMAL = TokenType.CONTROL, TokenType.NORMAL


@pytest.mark.parametrize(
    ("ends", "ids", "expected"),
    [
        ({}, {}, {256}),
        ({"<|im_end|>": CONTROL, "<|endoftext|>": CONTROL}, {}, {256, 259, 260}),
        ({"<|eot_id|>": NORMAL, "<other>": CONTROL}, {}, {256}),
        ({"<a>": NORMAL, "<b>": NORMAL}, {"eot": 259, "eom": 260}, {256, 259, 260}),
        ({"<a>": NORMAL}, {"eot": 1000}, {256}),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, {}, {256, 260, 261}),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL}, {}, {256, 259, 260}),
    ],
)
def test_an_answer_ends_with_every_token_that_ends_one(
    tmp_path: Path, ends: dict[str, TokenType], ids: dict[str, int], expected: set[int]
) -> None:
    assert load_model(written(tmp_path / "tiny.gguf", pre="smollm", ends=ends, **ids)).eos_token_ids == expected


PIECES = ["a", "b", "é", "▁", "🙂", "ab", "▁a", "a🙂", "éab", "▁▁", "▁▁a", "ab▁▁a", "aab", "q"]
VOCABULARY = {piece: number for number, piece in enumerate(PIECES)}
needs_mapping = pytest.mark.skipif(gguf_tokenizer_mapping is None, reason="an older version of transformers")


@needs_mapping
@pytest.mark.parametrize("scores", [{p: -i for i, p in enumerate(PIECES)}, dict.fromkeys(PIECES, 0.0)])
def test_merges_are_derived_once(scores: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts()
    expected = gguf_tokenizer_mapping.generate_merges(VOCABULARY, scores)
    assert ("ab", "▁▁a") in expected
    with replaced(remembered_merges(facts)):
        assert gguf_tokenizer_mapping.generate_merges(VOCABULARY, scores) == expected
    later = Facts(facts.known())
    monkeypatch.setattr(gguf_tokenizer_mapping, "generate_merges", None)  # nobody calls it
    with replaced(remembered_merges(later)):
        assert gguf_tokenizer_mapping.generate_merges(VOCABULARY, scores) == expected


@needs_mapping
def test_merges_that_cannot_be_written_down_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, others = Facts(), [("q", "q")]
    monkeypatch.setattr(gguf_tokenizer_mapping, "generate_merges", lambda *_: others)
    with replaced(remembered_merges(facts)):
        assert gguf_tokenizer_mapping.generate_merges(VOCABULARY, None) == others
    assert facts.known() == {}
