"""Text that people are shown: what a client may have stored, and how text from elsewhere is printed.

A terminal obeys control characters, and right-to-left overrides show a line in another order than it is stored. Neither belongs into
a name or a note. https://www.unicode.org/reports/tr36/ (Unicode Security Considerations), CVE-2021-42574.
"""

import re

from shared.errors import InvalidInput

# C0 and C1 controls with DEL, line and paragraph separators, explicit embeddings, overrides and isolates, unpaired surrogates.
_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def check_plain_text(
    text: str,
    field: str,
    *,
    max_characters: int,
    reason: str = "BAD_TEXT",
    too_long: str = "TEXT_TOO_LONG",
) -> str:
    """`text`, to be stored under the name `field`, without any character that changes how a terminal shows it, line breaks included.

    Raises InvalidInput with `too_long` or `reason`.
    """
    if len(text) > max_characters:
        raise InvalidInput(
            f"{field} has {len(text)} characters; at most {max_characters} are kept",
            reason=too_long,
        )
    found = _FORBIDDEN.search(text)
    if found is not None:
        raise InvalidInput(
            f"{field} holds U+{ord(found.group()):04X} at position {found.start()}: control characters, line breaks and"
            " right-to-left overrides are not kept",
            reason=reason,
        )
    return text


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""`text` with every character that a terminal would obey as \uXXXX, except those in `keep`.

    Of a JSON document the result is the same document, because JSON reads these escapes itself.
    """
    return _FORBIDDEN.sub(
        lambda found: found.group() if found.group() in keep else f"\\u{ord(found.group()):04x}",
        text,
    )


def one_line(text: str) -> str:
    """The same, line breaks and tabs included."""
    return printable(text, keep="")
