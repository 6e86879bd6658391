"""Given text: files and datasets, tokenised and cut into sequences. A source that cannot be read is an error."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from calibrator_service.calibration.spec import HubDataset, TextFile
from calibrator_service.calibration.text.documents import Document, json_documents, pieces, text_documents
from calibrator_service.calibration.text.hub import hub_texts
from calibrator_service.calibration.text.shards import TokenSequence
from shared.errors import InvalidInput, NotFound
from shared.model.loaded import LoadedModel

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
