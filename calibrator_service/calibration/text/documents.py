"""Given text: files and datasets, read in pieces, tokenised and cut into sequences. Errors name the file, the line's
number and the reason."""

import codecs
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from calibrator_service.calibration.spec import HubDataset, TextFile
from calibrator_service.calibration.text.hub import hub_texts
from calibrator_service.calibration.text.shards import TokenSequence
from shared.errors import InvalidInput, NotFound
from shared.model.loaded import LoadedModel

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


SEQUENCE_TOKENS = 256
MIN_SEQUENCE_TOKENS = 16


def text_sequences(loaded: LoadedModel, source: TextFile | HubDataset) -> Iterator[TokenSequence]:
    """Packs the source's documents into sequences of SEQUENCE_TOKENS tokens, with an end-of-sequence token after each
    document.

    A document is a .txt file, a line of a .jsonl file, or a row of a dataset. Raises `NotFound` (FILE_NOT_FOUND),
    `InvalidInput` for a model without a tokenizer, what `documents` raises for a file that is no text, and what
    `hub_texts` raises.
    """
    if loaded.tokenizer is None:
        raise InvalidInput("text was given, but the model has no tokenizer")
    documents = _file_documents(source) if isinstance(source, TextFile) else map(pieces, hub_texts(source))
    length = min(SEQUENCE_TOKENS, loaded.context_length)
    return _pack(loaded.tokenizer, documents, length)


def _pack(tokenizer: PreTrainedTokenizerBase, documents: Iterable[Document], length: int) -> Iterator[TokenSequence]:
    buffer: list[int] = []
    separator = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    for document in documents:
        is_empty = True
        for piece in document:
            tokens: list[int] = tokenizer(piece, add_special_tokens=False)["input_ids"]
            buffer += tokens
            is_empty = is_empty and not tokens
            while len(buffer) >= length:
                yield TokenSequence(tuple(buffer[:length]), length)
                del buffer[:length]
        if not is_empty:
            buffer += separator
    if len(buffer) >= min(MIN_SEQUENCE_TOKENS, length):
        yield TokenSequence(tuple(buffer), len(buffer))


def _file_documents(source: TextFile) -> Iterator[Document]:
    path = Path(source.path)
    if path.suffix not in (".txt", ".jsonl"):
        raise InvalidInput(f"{path.name} is neither .txt nor .jsonl", reason="UNSUPPORTED_FILE_TYPE")
    check_is_file(path)
    if path.suffix == ".txt":
        return text_documents(path)
    return json_documents(path, source.field or "text")


def check_is_file(path: Path) -> None:
    """Raises `NotFound` (FILE_NOT_FOUND)."""
    if not path.is_file():
        raise NotFound(f"there is no file {path}", reason="FILE_NOT_FOUND")
