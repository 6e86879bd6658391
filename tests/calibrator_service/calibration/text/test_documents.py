"""Documents of text files, and errors of lines that cannot be used."""

import json
from pathlib import Path

import pytest

from calibrator_service.calibration.spec import TextFile
from calibrator_service.calibration.text import documents
from calibrator_service.calibration.text.documents import (
    SEQUENCE_TOKENS,
    json_documents,
    text_documents,
    text_sequences,
)
from shared.errors import InvalidInput, NotFound
from tests.reasons import raises


def written(tmp_path: Path, name: str, content: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_a_text_file_is_one_document_as_it_stands(tmp_path):
    text = " = Heading = \n\nA line that was\nwrapped.\n\nA\u2028paragraph\x0b\x85 \x00.\n"
    path = written(tmp_path, "a.txt", text.encode())
    assert ["".join(document) for document in text_documents(path)] == [text]
    windows = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    path = written(tmp_path, "b.txt", windows)
    assert ["".join(document) for document in text_documents(path)] == [text]


@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 18])
def test_a_large_file_comes_in_pieces_cut_between_words(tmp_path, monkeypatch, read_bytes):
    monkeypatch.setattr(documents, "MAX_PIECE_CHARACTERS", 20)
    monkeypatch.setattr(documents, "READ_BYTES", read_bytes)
    text = "Žluťoučký kůň\n\n" * 20 + "x" * 50 + "\nend"
    path = written(tmp_path, "a.txt", text.replace("\n", "\r\n").encode())
    (document,) = text_documents(path)
    found = list(document)
    assert "".join(found) == text
    assert max(map(len, found)) <= 20
    assert found[0].endswith("\n")


def test_jsonl_has_a_document_per_line_and_only_its_field_is_read(tmp_path):
    big = b"1" * 10_000
    lines = [
        b'\xef\xbb\xbf{"body": "one\\u2028\\u0000 more"}\r\n',
        b"\n   \n",
        b'{"body": "  ", "n": ' + big + b"}\n",
        b'{"n": [' + big + b", 1e" + big + b", NaN, -Infinity], " + b'"body": "two\xe2\x80\xa8"}\n',
        b'{"other": "\\ud800", "body": "three"}',
    ]
    path = written(tmp_path, "a.jsonl", b"".join(lines))
    texts = ["".join(document) for document in json_documents(path, "body")]
    assert texts == ["one\u2028\x00 more", "two\u2028", "three"]
    assert list(json_documents(written(tmp_path, "empty.jsonl", b""), "body")) == []


DEEP = b'{"text": "x", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD_LINES = {
    "half a surrogate pair": (b'{"text": "a\\ud83d"}', "NOT_UNICODE"),
    "deep nesting": (DEEP, "NOT_JSON"),
    "a number as text": (b'{"text": ' + b"9" * 10_000 + b"}", "FIELD_NOT_FOUND"),
    "NaN as text": (b'{"text": NaN}', "FIELD_NOT_FOUND"),
    "null as text": (b'{"text": null}', "FIELD_NOT_FOUND"),
    "a list": (b"[1]", "FIELD_NOT_FOUND"),
    "a string": (b'"text"', "FIELD_NOT_FOUND"),
    "a missing field": (b'{"body": "x"}', "FIELD_NOT_FOUND"),
    "no JSON": (b"{oops", "NOT_JSON"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "NOT_JSON"),
    "bytes that are no UTF-8": (b'{"text": "\xff"}', "NOT_UTF8"),
    "a surrogate in UTF-8": (b'{"text": "\xed\xa0\xbd"}', "NOT_UTF8"),
    "a line without end": (json.dumps({"text": "x" * 300_000}).encode(), "LINE_TOO_LONG"),
}


@pytest.mark.parametrize("what", BAD_LINES)
def test_an_error_names_the_bad_line(tmp_path, monkeypatch, what):
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1 << 18)
    content, reason = BAD_LINES[what]
    path = written(tmp_path, "a.jsonl", b'{"text": "good"}\n\n' + content + b"\n")
    read = json_documents(path, "text")
    assert "".join(next(read)) == "good"
    with raises(InvalidInput, reason) as caught:
        next(read)
    assert "a.jsonl, line 3" in caught.value.message


def test_a_text_file_that_is_not_utf8(tmp_path):
    path = written(tmp_path, "a.txt", b"good\n" * 100_000 + b"b\xe4d\n")
    with raises(InvalidInput, "NOT_UTF8", match=r"a\.txt, line 100001 is not UTF-8"):
        list(*text_documents(path))


def test_text_is_packed_with_a_separator_between_documents(counting, tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["w0 w1 w2", " ", "w3 " * 300]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    sequences = list(text_sequences(counting, TextFile(str(path))))
    length = min(SEQUENCE_TOKENS, counting.context_length)
    assert [len(s.tokens) for s in sequences[:2]] == [length, length]
    assert sequences[0].tokens[:6] == (5, 6, 7, 1, 8, 8)
    assert all(s.answer_start == len(s.tokens) for s in sequences)
    assert sum(len(s.tokens) for s in sequences) == 3 + 1 + 300 + 1


def test_jsonl_field(counting, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"body": "w4 w5 " * 20}) for _ in range(3)))
    assert next(text_sequences(counting, TextFile(str(path), "body"))).tokens[:2] == (9, 10)


@pytest.mark.parametrize(
    ("name", "content", "error", "reason"),
    [
        ("a.txt", None, NotFound, "FILE_NOT_FOUND"),
        ("a.csv", b"x", InvalidInput, "UNSUPPORTED_FILE_TYPE"),
        ("a.txt", b"\xff\xfe\xfa", InvalidInput, "NOT_UTF8"),
        ("a.jsonl", b"{oops", InvalidInput, "NOT_JSON"),
        ("a.jsonl", b'{"other": "x"}', InvalidInput, "FIELD_NOT_FOUND"),
        ("a.jsonl", b'{"text": 5}', InvalidInput, "FIELD_NOT_FOUND"),
        ("a.jsonl", b"[1]", InvalidInput, "FIELD_NOT_FOUND"),
    ],
)
def test_bad_files(counting, tmp_path, name, content, error, reason):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with raises(error, reason):
        list(text_sequences(counting, TextFile(str(path))))
