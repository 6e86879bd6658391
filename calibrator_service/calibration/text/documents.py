"""Reads the documents of a text file, in pieces. Errors name the file, the line's number and the reason."""

import codecs
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.errors import InvalidInput

# Documents are tokenised in pieces, so that a huge document needs little memory.
MAX_PIECE_CHARACTERS = 100_000
READ_BYTES = 1 << 18
# A line of JSON must be held in memory as a whole.
MAX_LINE_BYTES = 64 << 20

# The pieces of one document, to be read in order.
Document = Iterator[str]


def text_documents(path: Path) -> Iterator[Document]:
    """The whole file as one document, with line ends as "\\n" and without a byte order mark.
    Lines and paragraphs are not documents.

    Raises InvalidInput (NOT_UTF8, FILE_UNREADABLE).
    """
    yield _text_pieces(path)


def json_documents(path: Path, field: str) -> Iterator[Document]:
    """One document per line: the text in `field` of its object. Blank lines and blank texts are skipped.

    Numbers are never converted, so their size does not matter. Raises InvalidInput (NOT_UTF8, NOT_JSON, NOT_UNICODE,
    FIELD_NOT_FOUND, LINE_TOO_LONG, FILE_UNREADABLE).
    """
    for where, line in json_lines(path):
        text = _text_of_line(line, field, where)
        if text.strip():
            yield pieces(text)


def json_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file that are not blank, each with the words that name it in an error. Raises InvalidInput
    (LINE_TOO_LONG, FILE_UNREADABLE)."""
    with _opened(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path.name}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise InvalidInput(f"{where} is longer than {MAX_LINE_BYTES >> 20} MiB", reason="LINE_TOO_LONG")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield where, line


def pieces(text: str) -> Iterator[str]:
    """Cuts `text` into pieces of at most MAX_PIECE_CHARACTERS, after a line end or else after a space if there is
    one."""
    start = 0
    while (end := start + MAX_PIECE_CHARACTERS) < len(text):
        cut = (text.rfind("\n", start, end) + 1) or (text.rfind(" ", start, end) + 1) or end
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _text_pieces(path: Path) -> Iterator[str]:
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    rest, num_lines = "", 0
    with _opened(path) as file:
        while True:
            data = file.read(READ_BYTES)
            try:
                rest += decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                before = bytes(error.object)[: error.start].count(b"\n")
                raise _not_utf8(f"{path.name}, line {num_lines + before + 1}") from error
            num_lines += data.count(b"\n")
            if not data:
                break
            *whole, rest = pieces(rest) if rest else [""]
            yield from whole
    yield from pieces(rest)


def _text_of_line(line: bytes, field: str, where: str) -> str:
    text = json_object(line, where, parse_int=_skip_number, parse_float=_skip_number).get(field)
    if not isinstance(text, str):
        raise InvalidInput(f"{where} has no text in the field {field!r}", reason="FIELD_NOT_FOUND")
    return checked_text(text, field, where)


def json_object(line: bytes, where: str, **options: Any) -> dict[str, Any]:
    """The object of a line. `options`: of `json.loads`. Raises InvalidInput (NOT_UTF8, NOT_JSON, FIELD_NOT_FOUND)."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(where) from error
    try:
        record: Any = json.loads(text, **options)
    except ValueError as error:  # also a number with too many digits
        raise InvalidInput(f"{where} is not JSON", reason="NOT_JSON") from error
    except RecursionError as error:
        raise InvalidInput(f"{where} is nested too deeply", reason="NOT_JSON") from error
    if not isinstance(record, dict):
        raise InvalidInput(f"{where} is not a JSON object", reason="FIELD_NOT_FOUND")
    return record


def checked_text(text: str, field: str, where: str) -> str:
    """The text itself. Raises InvalidInput (NOT_UNICODE)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{where} has half of a surrogate pair in the field {field!r}", reason="NOT_UNICODE"
        ) from error
    return text


def _skip_number(_: str) -> None:
    """Replaces the conversion of numbers: no number is needed, and Python refuses to convert very long ones."""


def _not_utf8(where: str) -> InvalidInput:
    return InvalidInput(f"{where} is not UTF-8", reason="NOT_UTF8")


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    try:
        file = path.open("rb")
    except PermissionError as error:
        raise InvalidInput(f"{path.name} may not be read", reason="FILE_UNREADABLE") from error
    with file:
        yield file
