"""Given text is read unchanged or refused with a reason."""

import json

import pytest

from calibrator_service.calibration.spec import TextFile
from calibrator_service.calibration.text.sources import SEQUENCE_TOKENS, text_sequences
from shared.errors import InvalidInput, NotFound


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
    with pytest.raises(error) as caught:
        list(text_sequences(counting, TextFile(str(path))))
    assert caught.value.reason == reason
