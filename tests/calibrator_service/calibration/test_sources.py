"""Given text: read as it is, or refused with the reason."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from calibrator_service.calibration.sources import SEQUENCE_TOKENS, text_sequences
from calibrator_service.calibration.spec import HubDataset, TextFile
from shared.errors import InvalidInput, NeapError, NotFound, Unavailable
from shared.model.load import LoadedModel


def test_text_is_packed_with_documents_apart(counting: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("w0 w1 w2\n\n" + "w3 " * 300 + "\n")
    sequences = list(text_sequences(counting, TextFile(str(path))))
    length = min(SEQUENCE_TOKENS, counting.context_length)
    assert [len(s.tokens) for s in sequences[:2]] == [length, length]
    assert sequences[0].tokens[:6] == (5, 6, 7, 1, 8, 8)
    assert all(s.answer_start == len(s.tokens) for s in sequences)
    assert sum(len(s.tokens) for s in sequences) == 3 + 1 + 300 + 1


def test_jsonl_field(counting: LoadedModel, tmp_path: Path) -> None:
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
def test_bad_files(
    counting: LoadedModel,
    tmp_path: Path,
    name: str,
    content: bytes | None,
    error: type[NeapError],
    reason: str,
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error) as caught:
        list(text_sequences(counting, TextFile(str(path))))
    assert caught.value.reason == reason


def raising(error: Exception) -> Any:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise error

    return load_dataset


@pytest.mark.parametrize(
    ("raised", "error", "reason"),
    [
        (datasets.exceptions.DatasetNotFoundError("no"), NotFound, "DATASET_NOT_FOUND"),
        (ConnectionError("offline"), Unavailable, "DATASET_UNAVAILABLE"),
        (ValueError("BuilderConfig 'x' not found"), InvalidInput, "DATASET_CONFIG_NOT_FOUND"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_an_error_and_never_another_text(
    counting: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    error: type[NeapError],
    reason: str,
) -> None:
    monkeypatch.setattr(datasets, "load_dataset", raising(raised))
    with pytest.raises(error) as caught:
        list(text_sequences(counting, HubDataset("no/such")))
    assert caught.value.reason == reason


def test_a_dataset_is_streamed(counting: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(*args: Any, **options: Any) -> Any:
        asked.update(options, args=args)
        return ({"body": "w1 w2 " * 10} for _ in range(4))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = HubDataset("some/set", config="c", split="test", field="body")
    tokens = [t for s in text_sequences(counting, source) for t in s.tokens]
    assert tokens[:2] == [6, 7]
    assert asked == {"args": ("some/set", "c"), "split": "test", "streaming": True}
    with pytest.raises(InvalidInput, match="column"):
        list(text_sequences(counting, HubDataset("some/set")))
