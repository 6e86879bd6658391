"""The file of all answers, from which measuring that was interrupted continues.

Its first line describes the run; each further line is one answer.
"""

import json
from collections import UserDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neap_engine.evaluate.sides import TimedAnswer
from shared.errors import Corrupt, PreconditionFailed

# The number of a prompt, and the name of a side.
Key = tuple[int, str]


class AnswersFile(UserDict[Key, TimedAnswer]):
    """The answers in the file, which is created, or opened to continue. One that is set is appended.
    `run` identifies model, router, prompts and options.

    A last line that is incomplete is removed. Raises `PreconditionFailed` (RESULTS_OF_ANOTHER_RUN), and `Corrupt` for
    any other file.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        super().__init__()
        self._path = path
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if whole:
            self._read(whole, run)
        elif not json.dumps(run).encode().startswith(text):
            raise self._not_results()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(len(whole))
        if not whole:
            self._append(run)

    def __setitem__(self, key: Key, answer: TimedAnswer) -> None:
        self._append({"prompt": key[0], "side": key[1], **asdict(answer)})
        super().__setitem__(key, answer)

    def _read(self, text: bytes, run: Mapping[str, Any]) -> None:
        try:
            first, *records = [json.loads(line) for line in text.splitlines()]
            for record in records:
                key = record.pop("prompt"), record.pop("side")
                answer = TimedAnswer(**{**record, "token_ids": tuple(record["token_ids"])})
                self.data[key] = answer
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._not_results() from error
        if first != run:
            raise PreconditionFailed(
                f"{self._path} has results of another model, router, set of prompts, or number of tokens; name another "
                "file",
                reason="RESULTS_OF_ANOTHER_RUN",
            )

    def _not_results(self) -> Corrupt:
        return Corrupt(f"{self._path} is not a file of results; name another one")

    def _append(self, record: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
