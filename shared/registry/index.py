"""The interface of the indexes, in memory or in Redis.
An index answers what a model's journal says and can be made anew from it."""

from collections.abc import Sequence
from typing import Protocol

from shared.registry.journal import VersionRecord
from shared.registry.state import Advance, Event, ModelState

# Replace an index whatever record it is at.
ANYWHERE = -1
EVENT_PAGE = 100


class IndexDamaged(Exception):
    """The index of a model cannot be read. The text is for the log."""


class Index(Protocol):
    """Thread-safe. Methods that read raise IndexDamaged. All raise the errors of the index's server."""

    # How long after a look into the journal answers are given without another look.
    freshness_s: float
    # Whether it may have lost what it knew, so that an empty answer has to be compared with the journal.
    may_forget: bool

    def open(self, registry_id: str) -> None:
        """Check that the index can be used, for this registry only. Call it before any query."""

    def check_writable(self) -> None: ...

    def state(self, model_id: str) -> ModelState:
        """Return the model's state, empty if it is not in the index."""

    def versions(self, model_id: str, numbers: Sequence[int]) -> list[VersionRecord]:
        """Return the records of existing versions, in the order of `numbers`."""

    def version_of_request(self, model_id: str, request_id: str) -> int | None: ...

    def events(self, model_id: str, after: int) -> list[Event]:
        """Return the next page of events."""

    def wait(self, model_id: str, after: int, timeout_s: float) -> None:
        """Wait until there is an event after `after`, for at most `timeout_s`.
        May return early, to have the journal looked at."""

    def advance(self, model_id: str, step: Advance, *, replace_at: int | None = None) -> int:
        """Apply all of `step` atomically if the index is at the record where `step` begins.
        Returns the record where it is now.

        With `replace_at`, replace an index that is at that record by `step`, which begins at an empty index.
        """

    def close(self) -> None: ...
