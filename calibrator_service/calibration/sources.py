"""Text that is given: files and datasets, tokenised and cut into sequences. Never replaced by another text."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from calibrator_service.calibration.hub import hub_texts
from calibrator_service.calibration.shards import TokenSequence
from calibrator_service.calibration.spec import HubDataset, TextFile
from shared.errors import InvalidInput, NotFound
from shared.model.load import LoadedModel

SEQUENCE_TOKENS = 256
MIN_SEQUENCE_TOKENS = 16
# Documents are tokenised in pieces, so that one huge line does not decide the memory.
MAX_PIECE_CHARACTERS = 100_000


def text_sequences(loaded: LoadedModel, source: TextFile | HubDataset) -> Iterator[TokenSequence]:
    """The source's documents packed into sequences of SEQUENCE_TOKENS tokens.

    Raises `NotFound` (FILE_NOT_FOUND, DATASET_NOT_FOUND), `Unavailable` (DATASET_UNAVAILABLE) and `InvalidInput` (a file that is no
    text, a field that is not there).
    """
    if loaded.tokenizer is None:
        raise InvalidInput("text was given, but the model has no tokenizer")
    documents = _file(source) if isinstance(source, TextFile) else hub_texts(source)
    length = min(SEQUENCE_TOKENS, loaded.context_length)
    return _pack(loaded.tokenizer, documents, length)


def _pack(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], length: int
) -> Iterator[TokenSequence]:
    buffer: list[int] = []
    separator = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    for document in documents:
        for start in range(0, len(document), MAX_PIECE_CHARACTERS):
            piece = document[start : start + MAX_PIECE_CHARACTERS]
            buffer += tokenizer(piece, add_special_tokens=False)["input_ids"]
            while len(buffer) >= length:
                yield TokenSequence(tuple(buffer[:length]), length)
                del buffer[:length]
        if buffer:
            buffer += separator
    if len(buffer) >= min(MIN_SEQUENCE_TOKENS, length):
        yield TokenSequence(tuple(buffer), len(buffer))


def _file(source: TextFile) -> Iterator[str]:
    path = Path(source.path)
    if path.suffix not in (".txt", ".jsonl"):
        raise InvalidInput(
            f"{path.name} is neither .txt nor .jsonl", reason="UNSUPPORTED_FILE_TYPE"
        )
    if not path.is_file():
        raise NotFound(f"there is no file {source.path}", reason="FILE_NOT_FOUND")
    return _lines(path, source.field or "text")


def _lines(path: Path, field: str) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                yield line if path.suffix == ".txt" else _field(line, field, f"line {number}")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path.name} is not UTF-8", reason="NOT_UTF8") from error
    except PermissionError as error:
        raise InvalidInput(f"{path.name} may not be read", reason="FILE_UNREADABLE") from error


def _field(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{where} is not JSON", reason="NOT_JSON") from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InvalidInput(f"{where} has no text in the field {field!r}", reason="FIELD_NOT_FOUND")
    return text
