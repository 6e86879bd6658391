"""What a job is to do, as the service keeps it on disk. Free of torch, so that the service starts at once and stays small.

The job's process makes the `CalibrationSpec` of `calibrator_service.calibration` from it (see `calibrator_service.recipe`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, get_args

from shared.errors import Corrupt, InvalidInput

MAX_ROUTER_WIDTH = 8192
MAX_NEW_TOKENS = 65_536
MAX_RUNGS = 64
# What google.protobuf.Duration can hold, about 10,000 years. The service's own limit is a setting, and far below.
MAX_BUDGET_S = 315_576_000_000.0
Label = Literal["agreement", "cosine"]
HeadForm = Literal["affine", "gated"]
_LARGEST_INTEGER = 2**63 - 1
_LARGEST_UINT32 = 2**32 - 1


class ProgressReport(Protocol):
    """What calibration reports: `Progress` of `calibrator_service.calibration.spec`, or this module's."""

    @property
    def phase(self) -> str: ...
    @property
    def fraction(self) -> float: ...
    @property
    def figures(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class Progress:
    phase: str
    fraction: float
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SelfGenerated:
    """No prompts: the model writes them too. `max_new_tokens` 0: the default."""

    prompts: tuple[str, ...] = ()
    max_new_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise _bad(
                "self_generated.max_new_tokens",
                f"max_new_tokens is {self.max_new_tokens}; it must be in [0, {MAX_NEW_TOKENS}]",
            )
        if any(not prompt.strip() for prompt in self.prompts):
            raise InvalidInput("one of the prompts is empty", reason="EMPTY_PROMPT")


@dataclass(frozen=True)
class TextFile:
    path: str
    field: str = "text"


@dataclass(frozen=True)
class HubDataset:
    name: str
    config: str = ""
    split: str = "train"
    field: str = "text"

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise _bad("hub_dataset.name", "the hub dataset has no name")


Source = SelfGenerated | TextFile | HubDataset
_SOURCES: dict[str, type[Source]] = {
    kind.__name__: kind for kind in (SelfGenerated, TextFile, HubDataset)
}


@dataclass(frozen=True)
class JobSpec:
    """Zero and empty mean the calibration's own choice: without `max_tokens` and budget, the quick preset's budget.

    Raises InvalidInput (reason BAD_SPEC).
    """

    model_id: str
    source: Source
    max_tokens: int = 0
    time_budget_s: float | None = None
    rung_depths: tuple[int, ...] = ()
    label: Label = "agreement"
    cosine_threshold: float = 0.98
    head_form: HeadForm = "gated"
    draft_vocabulary_size: int = 0
    router_width: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.max_tokens <= _LARGEST_INTEGER:
            raise _bad("max_tokens", f"max_tokens is {self.max_tokens}; it must be in [0, 2^63)")
        if self.time_budget_s is not None and not 0 < self.time_budget_s <= MAX_BUDGET_S:
            raise _bad(
                "time_budget",
                f"time_budget is {self.time_budget_s} s; it must be positive and at most {MAX_BUDGET_S:.0f} s",
            )
        if len(self.rung_depths) > MAX_RUNGS or len(set(self.rung_depths)) < len(self.rung_depths):
            raise _bad("rung_depths", f"rung_depths must be at most {MAX_RUNGS} different depths")
        if any(not 0 <= depth <= _LARGEST_UINT32 for depth in self.rung_depths):
            raise _bad("rung_depths", "a rung's depth must be in [0, 2^32)")
        if self.label not in get_args(Label):
            raise _bad("label", f"label is {self.label!r}; it must be agreement or cosine")
        if self.head_form not in get_args(HeadForm):
            raise _bad("head_form", f"head_form is {self.head_form!r}; it must be affine or gated")
        if not 0.0 < self.cosine_threshold <= 1.0:
            raise _bad(
                "cosine_threshold",
                f"cosine_threshold is {self.cosine_threshold}; it must be in (0, 1]",
            )
        if not 0 <= self.draft_vocabulary_size <= _LARGEST_UINT32:
            raise _bad("draft_vocabulary_size", "draft_vocabulary_size must be in [0, 2^32)")
        if not 1 <= self.router_width <= MAX_ROUTER_WIDTH:
            raise _bad(
                "router_width", f"router_width is {self.router_width}; at most {MAX_ROUTER_WIDTH}"
            )
        if not 0 <= self.seed <= _LARGEST_INTEGER:
            raise _bad("seed", f"seed is {self.seed}; it must be in [0, 2^63)")

    def to_json(self) -> str:
        """Equal specs give equal text."""
        record = asdict(self)
        record["source"] = {"kind": type(self.source).__name__, **asdict(self.source)}
        return json.dumps(record, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        """Raises Corrupt for a text that this build does not understand: a newer one may have written it, or an older one what is
        no longer allowed."""
        try:
            record: dict[str, Any] = json.loads(text)
            source = record.pop("source")
            kind = _SOURCES[source.pop("kind")]
            return cls(source=kind(**_frozen(source)), **_frozen(record))
        except InvalidInput as error:
            raise Corrupt(f"its spec is not one this build takes: {error.message}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Corrupt("its spec has fields or values that this build does not know") from error


def _frozen(record: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no tuples; these dataclasses hold nothing else."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in record.items()}


def _bad(field_name: str, message: str) -> InvalidInput:
    return InvalidInput(message, reason="BAD_SPEC", metadata={"field": f"spec.{field_name}"})
