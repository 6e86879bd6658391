"""Checks text from clients before it is stored and escapes text from elsewhere before it is printed.

A terminal interprets control characters, and right-to-left overrides display a line in another order than it is stored.
Names and notes must contain neither. https://www.unicode.org/reports/tr36/ (Unicode Security Considerations),
CVE-2021-42574.
"""

import re

from shared.errors import InvalidInput

# C0 and C1 controls with DEL, line and paragraph separators, explicit embeddings, overrides and isolates, unpaired
# surrogates.
_FORBIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def check_plain_text(
    text: str, field: str, *, max_characters: int, reason: str = "BAD_TEXT", too_long: str = "TEXT_TOO_LONG"
) -> str:
    """Return `text` if it contains no character that changes how a terminal displays it.
    Line breaks are such characters.

    `field` names the text in messages. Raises InvalidInput with the reason `too_long` or `reason`.
    """
    if len(text) > max_characters:
        raise InvalidInput(f"{field} has {len(text)} characters; at most {max_characters} are allowed", reason=too_long)
    match = _FORBIDDEN.search(text)
    if match is not None:
        raise InvalidInput(
            f"{field} contains U+{ord(match.group()):04X} at position {match.start()}: control characters, line breaks "
            "and right-to-left overrides are not allowed",
            reason=reason,
        )
    return text


def printable(text: str, *, keep: str = "\n\t") -> str:
    r"""Escape every character that a terminal would interpret as \uXXXX, except those in `keep`.

    An escaped JSON document means the same as the original, because JSON has the same escapes.
    """
    return _FORBIDDEN.sub(
        lambda match: match.group() if match.group() in keep else f"\\u{ord(match.group()):04x}", text
    )


def one_line(text: str) -> str:
    """Escape like `printable`, line breaks and tabs included."""
    return printable(text, keep="")
