"""Control tokens that a client writes are text: only those that the chat template writes have an effect.

transformers has the same since version 5.24 (`sanitize_control_tokens`), but calls the tokenizer for each one of them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from shared.errors import InvalidInput

# Stands within each control token that a client has written, behind its first character: what a template makes of it,
# such as JSON or Python's own form of a value, is no control token either. Unicode keeps this character out of texts.
MARK = "\ufdd0"

# Characters that stand before a text, in order.
BEFORE = ("\n", "0", "x")


class ControlTokens:
    """Those of one tokenizer and template: special tokens, and other added tokens that the template has, such as
    "<think>"."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        special = {token.content: token_id for token_id, token in added if token.special}
        # Blanks and line breaks, which are added tokens of some tokenizers, are ordinary text in a template.
        tags = {token.content: i for i, token in added if token.content in template and not token.content.isspace()}
        self._control_ids = {*special.values(), *tags.values()}
        self._any, self._special = _any_of({**special, **tags}), _any_of(special)
        self._marked = re.compile(f"({_any_of(map(_marked, {**special, **tags})).pattern})|{MARK}")
        self._spellings: dict[str, list[int]] = {}

    def mark(self, value: Any, may_have_tags: bool = False) -> Any:
        """The same value, with marks in all of its texts. `may_have_tags`: of the control tokens only special tokens
        are text, because a model wrote it, and the template may look for its tags."""
        if isinstance(value, str):
            found = self._special if may_have_tags else self._any
            return found.sub(lambda control: _marked(control[0]), value.replace(MARK, ""))
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(inner) for key, inner in value.items()}
        return [self.mark(inner) for inner in value] if isinstance(value, list | tuple) else value

    def encode(self, rendered: str) -> list[int]:
        """The token ids of a template's text whose values were marked. Raises `InvalidInput`, if the tokenizer has no
        other tokens for the text of one."""
        first, *rest = self._marked.split(rendered)
        ids = _encoded(self._tokenizer, [first])[0]
        for control, behind in zip(rest[::2], encode_behind(self._tokenizer, rest[1::2]), strict=True):
            if control:  # a template may have taken the text apart that a mark is in
                ids += self._spelling(control.replace(MARK, ""))
            ids += behind
        return ids

    def _spelling(self, control: str) -> list[int]:
        """The tokens of a control token's text."""
        if control not in self._spellings:
            tokens = self._spelled(control, by_character=False)
            if not self._control_ids.isdisjoint(tokens):  # merges lead to some
                tokens = self._spelled(control, by_character=True)
            if not self._control_ids.isdisjoint(tokens):
                raise InvalidInput(f"this model's tokenizer cannot read {control!r} as text")
            self._spellings[control] = tokens
        return self._spellings[control]

    def _spelled(self, text: str, *, by_character: bool) -> list[int]:
        """What the tokenizer's steps make of a text, without the one that finds added tokens."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

        def tokens(text: str) -> list[int]:
            pieces = [backend.normalizer.normalize_str(text) if backend.normalizer else text]
            if backend.pre_tokenizer:
                pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(pieces[0])]
            units: Iterable[str] = "".join(pieces) if by_character else pieces
            return [token.id for unit in units for token in backend.model.tokenize(unit)]

        spellings = (_without(tokens(before), tokens(before + text)) for before in (*BEFORE, ""))
        return next(filter(None, spellings), [])


def _marked(control: str) -> str:
    return f"{control[0]}{MARK}{control[1:]}"


def encode_behind(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text, as it is behind other text. Tokenizers of sentencepiece put a blank before a text of
    its own, but not behind another character; one that no token joins with the text is looked for."""
    found: list[list[int]] = [[] for _ in texts]
    left = [place for place, text in enumerate(texts) if text]
    for before in (*BEFORE, ""):
        if not left:
            break
        first, *encoded = _encoded(tokenizer, [before, *(before + texts[place] for place in left)])
        for place, ids in zip(left, encoded, strict=True):
            found[place] = _without(first, ids)
        left = [place for place in left if not found[place]]
    return found


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


# A tree of texts by their characters; an empty one stands where a text ends.
_Tree = dict[str, "_Tree"]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """The longest of these texts at a place. As a tree: of thousands of tokens that begin alike, each place of a text
    would otherwise be compared with every one."""
    tree: _Tree = {}
    for text in filter(None, texts):
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_branches(tree) if tree else "(?!)")


def _branches(node: _Tree) -> str:
    branches = []
    for beginning, inner in node.items():
        while len(inner) == 1 and "" not in inner:  # where there is no choice, groups need not be nested
            [(character, inner)] = inner.items()
            beginning += character
        if beginning:
            branches.append(re.escape(beginning) + _branches(inner))
    pattern = f"(?:{'|'.join(branches)})" if branches else ""
    return f"{pattern}?" if branches and "" in node else pattern


def _without(beginning: list[int], ids: list[int]) -> list[int]:
    """What follows the beginning; nothing if it is another one."""
    return ids[len(beginning) :] if ids[: len(beginning)] == beginning else []


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    return _control_tokens(tokenizer, str(tokenizer.chat_template))


# A tokenizer with another template has others.
_control_tokens = lru_cache(maxsize=16)(ControlTokens)
