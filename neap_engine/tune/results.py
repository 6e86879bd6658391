"""The file of a sweep's results, from which a sweep that was interrupted continues.

Its first line describes the run; each further line is one `Measurement`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shared.errors import Corrupt, PreconditionFailed

# Prompt, policy, threshold and margin of a `Measurement`.
Key = tuple[int, str, float | None, float | None]


@dataclass(frozen=True)
class Measurement:
    """One greedy answer. Under the policy relaxed either `threshold` or `margin` is a number; otherwise both are None.
    `bound`: the largest share of prompts whose answer differs, None unless one is certified. `decode_s`: seconds from
    the first token to the last, in `num_deep_passes` passes."""

    prompt: int
    policy: str
    threshold: float | None
    margin: float | None
    bound: float | None
    token_ids: tuple[int, ...]
    decode_s: float
    num_deep_passes: int

    @property
    def key(self) -> Key:
        return self.prompt, self.policy, self.threshold, self.margin


class ResultsFile:
    """Creates the file, or opens it to continue. `run` identifies model, router, prompts and options.

    `measured` holds the keys of the measurements in the file. A last line that is incomplete is removed.
    Raises `PreconditionFailed` (RESULTS_OF_ANOTHER_RUN), and `Corrupt` for a file that no sweep has written.
    """

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self._path = path
        self.measured: set[Key] = set()
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

    def add(self, measurement: Measurement) -> None:
        """Appends one measurement."""
        self._append(asdict(measurement))
        self.measured.add(measurement.key)

    def _read(self, text: bytes, run: Mapping[str, Any]) -> None:
        try:
            first, *records = [json.loads(line) for line in text.splitlines()]
            self.measured = {Measurement(**record).key for record in records}
        except (ValueError, TypeError) as error:
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
