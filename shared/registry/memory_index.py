"""An `Index` in the memory of one process."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.registry.index import ANYWHERE, EVENT_PAGE
from shared.registry.journal import VersionRecord
from shared.registry.state import Advance, Event, ModelState


@dataclass
class _Model:
    state: ModelState = field(default_factory=ModelState)
    versions: list[VersionRecord] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)


class MemoryIndex:
    """Other processes tell it nothing, so the journal is looked at every `freshness_s`, and every `poll_s` while an
    event is awaited."""

    may_forget = False

    def __init__(self, *, freshness_s: float, poll_s: float) -> None:
        self.freshness_s = freshness_s
        self._poll_s = poll_s
        self._models: dict[str, _Model] = {}
        self._changed = threading.Condition()

    def open(self, registry_id: str) -> None:
        """Nothing to check: it belongs to this process."""

    def check_writable(self) -> None:
        """Nothing to check."""

    def _model(self, model_id: str) -> _Model:
        return self._models.get(model_id) or _Model()

    def state(self, model_id: str) -> ModelState:
        return self._model(model_id).state

    def versions(self, model_id: str, numbers: Sequence[int]) -> list[VersionRecord]:
        known = self._model(model_id).versions
        return [known[number - 1] for number in numbers]

    def version_of_request(self, model_id: str, request_id: str) -> int | None:
        return self._model(model_id).requests.get(request_id)

    def events(self, model_id: str, after: int) -> list[Event]:
        with self._changed:
            known = self._model(model_id).events
            return known[after : after + EVENT_PAGE]

    def wait(self, model_id: str, after: int, timeout_s: float) -> None:
        with self._changed:
            if self.state(model_id).num_events <= after:
                self._changed.wait(min(timeout_s, self._poll_s))

    def advance(self, model_id: str, step: Advance, *, replace_at: int | None = None) -> int:
        with self._changed:
            old = self._model(model_id)
            begins_at = step.before if replace_at is None else replace_at
            if begins_at not in (ANYWHERE, old.state.applied):
                return old.state.applied
            new = _Model() if replace_at is not None else old
            # The state last: what it names is there when it is read.
            new.versions.extend(step.versions)
            new.requests.update({version.request_id: version.version for version in step.versions})
            new.events.extend(step.events)
            new.state = step.state
            self._models[model_id] = new
            self._changed.notify_all()
            return step.state.applied

    def close(self) -> None:
        """Nothing to close."""
