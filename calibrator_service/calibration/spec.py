"""What to calibrate, and on which text: checked when it is created, and told in digests and counts in the manifest.

Free of torch and protobuf: the service checks requests without loading the one, the calibration runs without the other.
Everybody who may generate may read a manifest, and it stays for ever. So it has neither prompts nor paths.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from shared.digests import PREFIX, digest_of
from shared.errors import InvalidInput, NotFound
from shared.field_types import check_limits, check_types
from shared.ladder.proposers import DEFAULT_CONFIDENCE_WIDTH
from shared.pool_names import DEFAULT_POOL

Label = Literal["agreement", "cosine"]

# The longest google.protobuf.Duration, about 10,000 years. The service's own limit is a setting and far lower.
MAX_BUDGET_S = 315_576_000_000.0
_MAX_INT64 = 2**63 - 1
_MAX_UINT32 = 2**32 - 1


@dataclass(frozen=True)
class SelfGenerated:
    """Text that the model writes itself. Without `prompts` the model also writes its prompts, or they are drawn from
    templates.

    `max_new_tokens`: longest answer; 0 means the default (`plan.DEFAULT_NEW_TOKENS`). `use_workers`: the service's
    inference workers answer the prompts, too.
    """

    prompts: tuple[str, ...] = ()
    max_new_tokens: int = 0
    use_workers: bool = False

    def __post_init__(self) -> None:
        check_types(self, "BAD_SPEC")
        check_limits(self, "SelfGenerated", "BAD_SPEC", "spec.self_generated.")
        if any(not prompt.strip() for prompt in self.prompts):
            raise InvalidInput("one of the prompts is empty", reason="EMPTY_PROMPT")


@dataclass(frozen=True)
class TextFile:
    """A .txt file, or a .jsonl file with the text in `field` of each line."""

    path: str
    field: str = "text"


@dataclass(frozen=True)
class AnswerFile:
    """A .jsonl file with a prompt and the model's answer to it on each line: see `text.answers`."""

    path: str


@dataclass(frozen=True)
class ServedTraffic:
    """Answers of a pool that workers have served and kept.

    `path`: the file with them, as that of an AnswerFile. The job's process sets it; it is not part of a stored spec.
    """

    pool: str = DEFAULT_POOL
    path: str = ""


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the Hugging Face Hub, which is streamed.

    `public_only`: read it without this machine's token. The job's process sets it; it is not part of a stored spec.
    """

    name: str
    config: str = ""
    split: str = "train"
    field: str = "text"
    public_only: bool = False

    def __post_init__(self) -> None:
        check_types(self, "BAD_SPEC")
        if not self.name.strip():
            raise _bad_spec("hub_dataset.name", "the hub dataset has no name")


@dataclass(frozen=True)
class ParentRouter:
    """The router that a calibration goes on from. Raises `InvalidInput` (BAD_SPEC).

    `version`: 0 if it is not looked up yet, or if the router is one of files. `alias`: what it was asked by, "" if by
    version. `share`: how much a token counts that the parent learned from, against one of the new text.
    """

    version: int = 0
    alias: str = ""
    manifest_digest: str = ""
    share: float = 1.0

    def __post_init__(self) -> None:
        check_types(self, "BAD_SPEC")
        if not 0 <= self.version <= _MAX_INT64:
            raise _bad_spec("parent.version", f"parent.version is {self.version}; it must be in [0, 2^63)")
        check_limits(self, "ParentRouter", "BAD_SPEC", "spec.parent.")


Source = SelfGenerated | TextFile | AnswerFile | ServedTraffic | HubDataset


@dataclass(frozen=True)
class CalibrationSpec:
    """A value of zero, an empty value or None leaves the choice to the calibration (see `plan.resolve`).

    `max_tokens` counts the tokens learned from, over all splits. Text is collected until `max_tokens` or the time
    budget is used up, whichever is first; with neither the budget is `plan.QUICK_BUDGET_S`. `ranks`: processes that the
    service shares the work among; what is learned does not depend on it. Raises `InvalidInput` (BAD_SPEC).
    """

    model_id: str = ""
    source: Source = field(default_factory=SelfGenerated)
    max_tokens: int = 0
    time_budget_s: float | None = None
    exit_depths: tuple[int, ...] = ()
    label: Label = "agreement"
    cosine_threshold: float = 0.98
    draft_vocabulary_size: int = 0
    confidence_width: int = DEFAULT_CONFIDENCE_WIDTH
    seed: int = 0
    parent: ParentRouter | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        check_types(self, "BAD_SPEC")
        check_limits(self, "CalibrationSpec", "BAD_SPEC", "spec.")
        for name, least, most, limits in (
            ("max_tokens", 0, _MAX_INT64, "[0, 2^63)"),
            ("draft_vocabulary_size", 0, _MAX_UINT32, "[0, 2^32)"),
            ("confidence_width", 1, _MAX_UINT32, "[1, 2^32)"),
            ("seed", 0, _MAX_INT64, "[0, 2^63)"),
            ("ranks", 1, _MAX_UINT32, "[1, 64]"),
        ):
            if not least <= (value := getattr(self, name)) <= most:
                raise _bad_spec(name, f"{name} is {value}; it must be in {limits}")
        if self.time_budget_s is not None and not 0 < self.time_budget_s <= MAX_BUDGET_S:
            raise _bad_spec(
                "time_budget",
                f"time_budget is {self.time_budget_s} s; it must be positive and at most {MAX_BUDGET_S:.0f} s",
            )
        if len(set(self.exit_depths)) < len(self.exit_depths):
            raise _bad_spec("exit_depths", "exit_depths must be different depths")
        if any(not 0 <= depth <= _MAX_UINT32 for depth in self.exit_depths):
            raise _bad_spec("exit_depths", "a proposer's depth must be in [0, 2^32)")
        if self.label not in get_args(Label):
            raise _bad_spec("label", f"label is {self.label!r}; it must be agreement or cosine")

    @property
    def may_have_parents_heads(self) -> bool:
        """Whether the router has the heads of its parent, with tables and confidences of its own, unless heads of its
        own are better: that of a pool, so that a worker can have hundreds (docs/decisions/025)."""
        pool = self.source.pool if isinstance(self.source, ServedTraffic) else DEFAULT_POOL
        return self.parent is not None and pool != DEFAULT_POOL

    @property
    def uses_workers(self) -> bool:
        """Whether inference workers are asked to write its text, too."""
        return isinstance(self.source, SelfGenerated) and self.source.use_workers


def _bad_spec(field_name: str, message: str) -> InvalidInput:
    return InvalidInput(message, reason="BAD_SPEC", metadata={"field": f"spec.{field_name}"})


Phase = Literal["loading", "collecting", "training_heads", "training_confidence", "evaluating", "publishing"]


@dataclass(frozen=True)
class Progress:
    """`fraction`: share of the whole job that is done, in [0, 1]; it never decreases.
    `figures`: named measurements so far."""

    phase: Phase
    fraction: float
    figures: Mapping[str, float] = field(default_factory=dict)


_PRIVATE = frozenset({"prompts", "path", "public_only"})


def source_record(source: Source) -> dict[str, Any]:
    """The record of a source. A file is read for its digest. Raises NotFound (FILE_NOT_FOUND), OSError."""
    record = {"kind": type(source).__name__, **without_texts(asdict(source))}
    if isinstance(source, TextFile | AnswerFile | ServedTraffic):
        path = Path(source.path)
        try:
            with path.open("rb") as file:
                digest = PREFIX + hashlib.file_digest(file, "sha256").hexdigest()
                record |= {"digest": digest, "size_bytes": file.tell()}
        except (FileNotFoundError, IsADirectoryError) as error:
            raise NotFound(f"there is no file {path}", reason="FILE_NOT_FOUND") from error
    return record


def published_spec(spec: CalibrationSpec, source: Mapping[str, Any]) -> dict[str, Any]:
    """The spec as a manifest has it, without the model's id, which has its own place.
    `source`: the record of its source."""
    record = {**asdict(spec), "source": dict(source)}
    del record["model_id"]
    return record


def without_texts(source: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a source, with a digest and a count in place of its prompts, and without its path."""
    shown = {name: value for name, value in source.items() if name not in _PRIVATE}
    if prompts := source.get("prompts"):
        shown |= {"digest": prompts_digest(prompts), "num_prompts": len(prompts)}
    return shown


def prompts_digest(prompts: Sequence[str]) -> str:
    """The digest of the prompts, in their order, as a JSON list without spaces and with ASCII characters
    only."""
    encoded = json.dumps(list(prompts), separators=(",", ":")).encode()
    return digest_of(encoded)
