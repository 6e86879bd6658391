"""Answers that were made before: a .jsonl file with a prompt and the model's answer to it on each line.

{"prompt": [token ids] or "text" or [{"role": .., "content": ..}, ..], "answer": [token ids] or "text", "kind": "maths"}

Texts are encoded as a worker would encode them. An answer may have been sampled, or written by another build of the
model, so the calibration computes the model's own choices. `kind` is optional: whole kinds of prompts are held out for
the report.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from calibrator_service.calibration.spec import AnswerFile, ServedTraffic
from calibrator_service.calibration.text.chat import PromptFormat, encode_rendered
from calibrator_service.calibration.text.documents import check_is_file, checked_text, json_lines, json_object
from calibrator_service.calibration.text.shards import TokenSequence
from shared.errors import InvalidInput
from shared.model.loaded import LoadedModel

log = structlog.get_logger("neap.calibration")


def answer_sequences(loaded: LoadedModel, source: AnswerFile | ServedTraffic) -> Iterator[TokenSequence]:
    """The file's prompts with their answers, cut to the model's context. Empty answers are skipped.

    Raises `NotFound` (FILE_NOT_FOUND), `InvalidInput` (BAD_ANSWER, TOKEN_OUT_OF_RANGE, NOT_UNICODE, NOT_JSON, NOT_UTF8,
    ...). Answers of another vocabulary are skipped in served traffic, which nobody can mend.
    """
    reader = _Reader(loaded)
    for where, record in _records(source):
        try:
            sequence = reader.sequence(record, where)
        except InvalidInput as error:
            if isinstance(source, AnswerFile):
                raise
            log.warning("a served answer is left out", reason=error.reason)
            continue
        if sequence.num_answer_tokens:
            yield sequence


def count_kinds(source: AnswerFile) -> Counter[str]:
    """How many lines have each kind; without those that have none. Raises as `answer_sequences`."""
    kinds = (record.get("kind") for _, record in _records(source))
    return Counter(kind for kind in kinds if isinstance(kind, str) and kind)


def _records(source: AnswerFile | ServedTraffic) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(source.path)
    check_is_file(path)
    for where, line in json_lines(path):
        yield where, json_object(line, where)


class _Reader:
    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._format = loaded, PromptFormat(loaded)

    def sequence(self, record: dict[str, Any], where: str) -> TokenSequence:
        prompt, answer = self._prompt(record.get("prompt"), where), record.get("answer")
        if isinstance(answer, str):
            tokenizer = self._tokenizer(where)
            answer = encode_rendered(tokenizer, checked_text(answer, "answer", where))
        tokens = [*prompt, *self._ids(answer, where)][: self._loaded.context_length]
        kind = record.get("kind")
        return TokenSequence(
            tuple(tokens), min(len(prompt), len(tokens)), is_greedy=False, kind=kind if isinstance(kind, str) else ""
        )

    def _prompt(self, prompt: Any, where: str) -> list[int]:
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt):
            turns = [(m.get("role"), m.get("content")) for m in prompt]
            if not all(isinstance(part, str) for turn in turns for part in turn):
                raise _bad(where, "has a message without a role or content")
            self._tokenizer(where)
            for part in (part for turn in turns for part in turn):
                checked_text(part, "prompt", where)
            return self._format.encode(turns)
        ids = self._ids(prompt, where)
        if not ids:
            raise _bad(where, "has an empty prompt")
        return ids

    def _ids(self, tokens: Any, where: str) -> list[int]:
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise _bad(where, "has no prompt and answer as texts or lists of token ids")
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._loaded.vocabulary_size:
            raise InvalidInput(
                f"{where} has a token outside the model's vocabulary of {self._loaded.vocabulary_size}",
                reason="TOKEN_OUT_OF_RANGE",
            )
        return tokens

    def _tokenizer(self, where: str) -> Any:
        if self._loaded.tokenizer is None:
            raise _bad(where, "has text, but the model has no tokenizer")
        return self._loaded.tokenizer


def _bad(where: str, what: str) -> InvalidInput:
    return InvalidInput(f"{where} {what}", reason="BAD_ANSWER")
