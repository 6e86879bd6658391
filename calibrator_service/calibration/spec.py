"""What to calibrate, on what, and what is heard of it while it runs."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shared.errors import InvalidInput
from shared.ladder.heads import HEAD_FORMS, HeadForm
from shared.ladder.ladder import Ladder
from shared.ladder.routers import DEFAULT_WIDTH

Label = Literal["agreement", "cosine"]
Phase = Literal[
    "loading", "collecting", "training_heads", "training_routers", "evaluating", "publishing"
]
MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class SelfGenerated:
    """Text the model writes itself; without `prompts` it writes or draws those too. `max_new_tokens` 0: the default."""

    prompts: tuple[str, ...] = ()
    max_new_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.max_new_tokens <= 65_536:
            raise InvalidInput(f"max_new_tokens is {self.max_new_tokens}; it must be in [0, 65536]")
        if any(not prompt.strip() for prompt in self.prompts):
            raise InvalidInput("one of the prompts is empty", reason="EMPTY_PROMPT")


@dataclass(frozen=True)
class TextFile:
    """A .txt file, or a .jsonl file whose `field` holds the text."""

    path: str
    field: str = "text"


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the Hugging Face hub, streamed. `public_only`: read without this machine's token."""

    name: str
    config: str = ""
    split: str = "train"
    field: str = "text"
    public_only: bool = False


Source = SelfGenerated | TextFile | HubDataset


@dataclass(frozen=True)
class CalibrationSpec:
    """Zero and empty mean "choose for me" (see `presets`). `max_tokens` counts tokens learnt from, over all splits.

    Collecting ends at `max_tokens` or in time for `time_budget_s`, whichever comes first; with neither the budget is
    `presets.QUICK_BUDGET_S`.
    """

    model_id: str = ""
    source: Source = field(default_factory=SelfGenerated)
    max_tokens: int = 0
    time_budget_s: float | None = None
    rung_depths: tuple[int, ...] = ()
    label: Label = "agreement"
    cosine_threshold: float = 0.98
    head_form: HeadForm = "gated"
    draft_vocabulary_size: int = 0
    router_width: int = DEFAULT_WIDTH
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise InvalidInput(f"max_tokens is {self.max_tokens}; it must not be negative")
        if self.time_budget_s is not None and not 0 < self.time_budget_s < math.inf:
            raise InvalidInput(f"time_budget_s is {self.time_budget_s}; it must be positive")
        if self.label not in get_args(Label):
            raise InvalidInput(f"label is {self.label!r}; it must be agreement or cosine")
        if not 0.0 < self.cosine_threshold <= 1.0:
            raise InvalidInput(f"cosine_threshold is {self.cosine_threshold}; it must be in (0, 1]")
        if self.head_form not in HEAD_FORMS:
            raise InvalidInput(f"head_form is {self.head_form!r}; it must be affine or gated")
        if any(depth < 0 for depth in self.rung_depths):
            raise InvalidInput("a rung's depth must not be negative")
        if self.draft_vocabulary_size < 0:
            raise InvalidInput("draft_vocabulary_size must not be negative")
        if not 1 <= self.router_width <= 8192:
            raise InvalidInput(f"router_width is {self.router_width}; it must be in [1, 8192]")
        if not 0 <= self.seed < 2**64:
            raise InvalidInput(f"seed is {self.seed}; it must be in [0, 2^64)")


@dataclass(frozen=True)
class Progress:
    """`fraction` of the whole job that is done, in [0, 1]; never falls."""

    phase: Phase
    fraction: float
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CalibrationResult:
    """The ladder and its held-out figures; `report` is JSON-able and what `pack_ladder` takes."""

    ladder: Ladder
    report: dict[str, Any]
