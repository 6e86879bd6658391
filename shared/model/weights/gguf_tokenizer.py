"""What a .gguf file says of its tokenizer beyond what transformers reads: how text is split before tokens are merged,
and which tokens end an answer.

The patterns are those of the models' own tokenizer.json, under the names that llama.cpp gives to them
(`src/llama-vocab.cpp`). A text is split by the first of them, each part by the next.
"""

import base64
import itertools
import zlib
from importlib import import_module
from typing import Any

import gguf
import numpy as np
import structlog
from tokenizers import Regex, decoders, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from shared.errors import UnsupportedModel
from shared.model.remembered.facts import Facts
from shared.model.weights.gguf_file import GgufContents
from shared.model.weights.reading import Replacement

log = structlog.get_logger("neap.model")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, marks: str = "", contractions: str = f"{_CONTRACTIONS}|") -> str:
    letters = rf"[\p{{L}}{marks}]+"
    return rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_BLANKS}"


def _cases(digits: str, contractions: str = "") -> str:
    """Words that may begin with capitals."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}{upper}*{lower}+{contractions}|{first}{upper}+{lower}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


_LLAMA3, _QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
_GPT4O = _cases(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")
_CHINESE = r"[一-龥ࠀ-一가-퟿]+"
# Letters with case. Numbers stand for characters that are often replaced by equivalent ones when text is copied.
_DEEPSEEK_WORDS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    r"\x{1F5F}-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻ"
    r"Ȿ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _BLANKS
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# Patterns by the names of the vocabularies that were learnt with them.
_SPLITS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): (_LLAMA3,),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): (_LLAMA3,),
    ("deepseek-llm",): ("[\r\n]", _DEEPSEEK_WORDS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CHINESE, r"\p{N}+"),
    ("deepseek-coder",): ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"): (r"\p{N}", _GPT2),
    ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais", "trillion"): (_GPT2,),
    ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"): (_QWEN2,),
    ("qwen35",): (_words(r"\p{N}", r"\p{M}"),),
    ("ufakzeka",): (_words(r"\p{N}", contractions=""),),
    ("bloom", "poro-chat", "gpt3-finnish"): (_BLOOM,),
    ("viking",): (_BLOOM, r"\p{N}"),
    ("tekken",): (_cases(r"\p{N}"),),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): (_GPT4O,),
    ("tiny_aya", "cohere2moe"): (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("seed-coder",): (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",),
}  # fmt: skip
SPLITS = {name: patterns for names, patterns in _SPLITS.items() for name in names}
# A part of the text that is a token is taken whole, whatever the merges would make of it.
_WHOLE = {*next(names for names in _SPLITS if "llama3" in names), "tekken"}
# Control tokens that end a turn, a message or a document, by their text: files often name only one of them.
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
}
# Vocabularies that have all of a set use the token as something else.
_NO_ENDS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|call|>", "<|flush|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)


def end_token_ids(contents: GgufContents) -> list[int]:
    """The tokens that end an answer, as llama.cpp takes them but for those of filling in the middle: those that the
    file names, and control tokens that are known by their text. A file that names one outside its vocabulary is not
    believed in this."""
    prefix, control = "tokenizer.ggml.", int(gguf.TokenType.CONTROL)
    tokens, types = (_values(contents, f"{prefix}{key}") for key in ("tokens", "token_type"))
    named = [_values(contents, f"{prefix}{key}_token_id") for key in ("eos", "eot", "eom")]
    ids = {int(token) for values in named for token in values if 0 <= int(token) < len(tokens)}
    controls = itertools.compress(range(len(tokens)), map(control.__eq__, types))
    known = {tokens[token]: token for token in controls}
    ends = _ENDS & known.keys()
    ends -= {no_end for others, no_end in _NO_ENDS if others <= ends}
    return sorted(ids | {known[text] for text in ends})


def split_as_the_file_says(tokenizer: PreTrainedTokenizerBase, contents: GgufContents) -> None:
    """Transformers knows few of these names, and splits text as GPT-2 does where it does not.

    Raises `UnsupportedModel` (reason TOKENIZER_UNKNOWN) for a name that is not known here either, or for a blank before
    the text that transformers puts or leaves out.
    """

    model = _values(contents, "tokenizer.ggml.model")
    if model == ["llama"]:
        _prefix_as_the_file_says(tokenizer, contents)
    if model != ["gpt2"]:  # others have one way to split text
        return
    name = next(map(str, _values(contents, "tokenizer.ggml.pre")), "")
    if not name:
        log.warning("the file does not say how text is split (tokenizer.ggml.pre), so it is split as GPT-2 does")
        name = "gpt-2"
    if name not in SPLITS:
        raise UnsupportedModel(
            f"the file's text is split as {name[:64]!r} says (tokenizer.ggml.pre), which is not known here",
            reason="TOKENIZER_UNKNOWN",
            metadata={"tokenizer.ggml.pre": name[:64]},
        )
    backend: Any = tokenizer.backend_tokenizer
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name]]
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_alone])
    backend.model.ignore_merges = name in _WHOLE


def remembered_merges(facts: Facts) -> list[Replacement]:
    """Has transformers derive the merges of a vocabulary that names none only where `facts` do not have them: a
    vocabulary of 262,144 tokens takes two seconds."""
    try:
        mapping: Any = import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")
    except ImportError:  # an older version of transformers
        return []
    derive = mapping.generate_merges

    def generate_merges(vocabulary: dict[str, int], *args: Any, **options: Any) -> list[tuple[str, str]]:
        tokens = list(vocabulary)
        if "merges" in facts.earlier:
            return _read_merges(facts.earlier["merges"], tokens)
        merges: list[tuple[str, str]] = derive(vocabulary, *args, **options)
        written = _written_merges(merges, tokens)
        if written is not None and _read_merges(written, tokens) == merges:
            facts.note("merges", written)
        return merges

    return [(mapping, "generate_merges", generate_merges)]


def _written_merges(merges: list[tuple[str, str]], tokens: list[str]) -> str | None:
    """Each as the number of the token that it makes, and where that is cut. None if one makes no token."""
    numbers = {token: number for number, token in enumerate(tokens)}
    made = [numbers.get(left + right, -1) for left, right in merges]
    if -1 in made:
        return None
    cut = np.array([len(left) for left, _ in merges], "<u4")
    return base64.b64encode(zlib.compress(np.array([made, cut], "<u4").tobytes(), 1)).decode()


def _read_merges(written: str, tokens: list[str]) -> list[tuple[str, str]]:
    made, cuts = np.frombuffer(zlib.decompress(base64.b64decode(written)), "<u4").reshape(2, -1).tolist()
    return [(token[:cut], token[cut:]) for token, cut in zip(map(tokens.__getitem__, made), cuts, strict=True)]


def _prefix_as_the_file_says(tokenizer: PreTrainedTokenizerBase, contents: GgufContents) -> None:
    """Sentencepiece puts a blank before a text, unless the file says otherwise."""
    [wanted] = _values(contents, "tokenizer.ggml.add_space_prefix") or [True]
    backend: Any = tokenizer.backend_tokenizer
    if _has_prefix(tokenizer) == wanted:
        return
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace) and not wanted:
        backend.pre_tokenizer.prepend_scheme = "never"
        blank = decoders.Replace("▁", " ")
        backend.decoder = decoders.Sequence([blank, decoders.ByteFallback(), decoders.Fuse()])
    if _has_prefix(tokenizer) != wanted:
        raise UnsupportedModel(
            f"the file states tokenizer.ggml.add_space_prefix = {wanted}, with which transformers would split text as "
            "another model",
            reason="TOKENIZER_UNKNOWN",
            metadata={"tokenizer.ggml.add_space_prefix": str(wanted)},
        )


def _has_prefix(tokenizer: PreTrainedTokenizerBase) -> bool:
    tokens = tokenizer.tokenize("a", add_special_tokens=False)
    return bool(tokens) and tokens[0].startswith("▁")


def _values(contents: GgufContents, key: str) -> list[Any]:
    field = contents.fields.get(key)
    return [] if field is None else field.values
