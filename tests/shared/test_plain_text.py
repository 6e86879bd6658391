import json

import pytest

from shared.errors import InvalidInput
from shared.plain_text import check_plain_text, one_line, printable
from tests.reasons import raises

OBEYED = ["\x00", "\t", "\n", "\r", "\x1b", "\x7f", "\x85", "\x9b", "\u2028", "\u2029"]
OBEYED += ["\u202a", "\u202e", "\u2066", "\u2069", "\ud800"]
SHOWN = ["plain", "naïve", "日本語", "עברית", "क्‍ष", "👩‍💻", "a\u00a0b", "\\x1b", ""]


@pytest.mark.parametrize("character", OBEYED)
def test_control_characters_are_neither_stored_nor_printed(character):
    text = f"before{character}[31mafter"
    with raises(InvalidInput, "BAD_TEXT", match=f"reason contains U\\+{ord(character):04X} at position 6") as raised:
        check_plain_text(text, "reason", max_characters=100)
    assert raised.value.message.isprintable()
    assert one_line(text) == f"before\\u{ord(character):04x}[31mafter"


@pytest.mark.parametrize("text", SHOWN)
def test_text_in_any_script_is_kept_and_printed_as_it_is(text):
    assert check_plain_text(text, "reason", max_characters=20) == text == printable(text) == one_line(text)


def test_too_long_text_is_refused():
    assert check_plain_text("x" * 20, "reason", max_characters=20)
    with raises(InvalidInput, "TEXT_TOO_LONG"):
        check_plain_text("x" * 21, "reason", max_characters=20)


def test_lines_and_json_documents_survive_printing():
    assert printable("a\n\tb\x1b") == "a\n\tb\\u001b"
    document = {"text": "a\u202e\x9b\n\x1b"}
    printed = printable(json.dumps(document, ensure_ascii=False))
    assert json.loads(printed) == document
    assert printed.isprintable()
