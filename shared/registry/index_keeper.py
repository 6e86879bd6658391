"""Keeps an index up to date with the journal and answers queries from it."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import structlog

from shared.errors import Corrupt, Exhausted, NeapError, NotFound, Unavailable
from shared.files import StepHook
from shared.registry.index import ANYWHERE, Event, Index, IndexDamaged, ModelState, advance
from shared.registry.journal import Journal, JournalEntry, VersionRecord
from shared.timeouts import COMMIT_S

# How long after a look that failed answers are given without another look.
RETRY_S = 1.0
# Clients may ask for any name. Beyond this all are looked for anew.
MAX_MODELS_NOTED = 10_000

T = TypeVar("T")
log = structlog.get_logger("neap.registry")


class IndexKeeper:
    """At most once every `index.freshness_s` seconds per model, queries check the journal for records that the index
    lacks.

    Records can be missing because another process wrote them, because their writer died or because Redis lost data. An
    unreadable index is rebuilt from the journal, once per query.

    Methods raise Unavailable, Exhausted (REDIS_FULL), Corrupt (the journal is needed and damaged), PreconditionFailed.
    """

    def __init__(self, index: Index, journal: Journal, *, step: StepHook) -> None:
        self._index = index
        self._journal = journal
        self._step = step
        self._looked_at_s: dict[str, float] = {}
        # model -> why its index is behind the journal
        self._problems: dict[str, str] = {}

    def state(self, model_id: str, *, is_fresh: bool = False) -> ModelState:
        """Return the model's state. With `is_fresh`, as writers need it, it has all records that exist when it is
        called."""
        state = self._known(model_id)
        now_s, looked_at_s = time.monotonic(), self._looked_at_s.get(model_id)
        may_be_lost = state.applied == 0 and self._index.may_forget
        pause_s = max(self._index.freshness_s, RETRY_S if model_id in self._problems else 0.0)
        is_due = looked_at_s is None or now_s - looked_at_s >= pause_s
        if not (is_fresh or may_be_lost or is_due):
            return state
        if state.applied:
            # Noted before the look, so that only one call waits while the store hangs.
            self._looked_at_s[model_id] = now_s
        try:
            if state.applied == 0 or self._is_behind(model_id, state.applied, is_fresh=is_fresh):
                state = self._catch_up(model_id, state)
            if len(self._looked_at_s) >= MAX_MODELS_NOTED:
                self._looked_at_s.clear()
            self._looked_at_s[model_id] = now_s
            self._problems.pop(model_id, None)
        except (Corrupt, Unavailable, Exhausted) as error:
            # An empty answer could be wrong.
            if is_fresh or state.applied == 0:
                raise
            # A folder is looked at for every request.
            if self._problems.get(model_id) != error.message:
                log.error("the index was not brought up to the journal", model_id=model_id, problem=error.message)
            self._problems[model_id] = error.message
        return state

    def _known(self, model_id: str) -> ModelState:
        return self._ask(model_id, lambda: self._index.state(model_id))

    def _is_behind(self, model_id: str, applied: int, *, is_fresh: bool) -> bool:
        if is_fresh and not self._journal.has(model_id, applied):
            # A writer that went on would leave a gap.
            raise Corrupt(
                f"the journal of {model_id!r} has lost record {applied}, which this process has read (was the store "
                "restored from a backup?); restore the record, or go on without it: restart all services, and with "
                "Redis run `neap routers rebuild-index`",
                reason="JOURNAL_INCOMPLETE",
                metadata={"model_id": model_id},
            )
        return self._journal.has(model_id, applied + 1)

    def _catch_up(self, model_id: str, state: ModelState) -> ModelState:
        while entries := self._journal.after(model_id, state.applied):
            step = advance(state, entries)
            now_at = self._index.advance(model_id, step)
            if self._index.may_forget:  # for the others this is how they learn of anything
                log.info("journal records applied", model_id=model_id, records=len(entries))
            try:
                state = self._index.state(model_id)
            except IndexDamaged as error:
                raise _damaged_again_error(model_id) from error
            if now_at >= step.state.applied:
                break
            # Somebody else has applied fewer records at the same time.
        return state

    def _ask(self, model_id: str, question: Callable[[], T]) -> T:
        try:
            return question()
        except IndexDamaged as error:
            log.error("the index is damaged and is restored", model_id=model_id, problem=str(error))
            self._replace(model_id)
        try:
            return question()
        except IndexDamaged as error:
            raise _damaged_again_error(model_id) from error

    def records(self, model_id: str, numbers: Sequence[int]) -> list[VersionRecord]:
        """Return the records of existing versions, in the order of `numbers`."""
        return self._ask(model_id, lambda: self._index.versions(model_id, numbers))

    def version_of_request(self, model_id: str, request_id: str) -> int | None:
        return self._ask(model_id, lambda: self._index.version_of_request(model_id, request_id))

    def events(self, model_id: str, after: int) -> list[Event]:
        """Return the next page of events."""
        return self._ask(model_id, lambda: self._index.events(model_id, after))

    def wait(self, model_id: str, after: int, timeout_s: float) -> None:
        """See `Index.wait`."""
        with suppress(IndexDamaged):  # the next page of events restores it
            self._index.wait(model_id, after, timeout_s)

    def sync(self, model_id: str) -> None:
        """See `Journal.sync`."""
        self._journal.sync(model_id)

    def commit(self, model_id: str, propose: Callable[[ModelState], JournalEntry | T]) -> JournalEntry | T:
        """Call `propose` with the newest state, record the entry it returns and add it to the index.

        If `propose` returns anything but an entry, nothing is recorded and the value is returned.
        """
        give_up_at = time.monotonic() + COMMIT_S
        state = self.state(model_id, is_fresh=True)
        while time.monotonic() < give_up_at:
            proposed = propose(state)
            if not isinstance(proposed, JournalEntry):
                self.sync(model_id)
                return proposed
            self._step("journal:begin")
            if self._journal.append(proposed):
                self._step("journal:written")
                try:
                    now_at = self._index.advance(model_id, advance(state, [proposed]))
                except NeapError as error:
                    self._looked_at_s.pop(model_id, None)  # the next reader applies the record
                    raise _recorded_error(error) from error
                if now_at < proposed.sequence:
                    # Redis has lost data since `state` was read.
                    self.state(model_id, is_fresh=True)
                self._step("index:advanced")
                return proposed
            # Another writer has taken this number: apply its record and propose again.
            state = self.state(model_id, is_fresh=True)
        raise _busy_error(model_id)

    def models(self) -> list[str]:
        """List all models with a published router."""
        return self._journal.models()

    def rebuild(self, model_id: str) -> ModelState:
        """Rebuild a model's index from its journal. Atomic: readers see the old or the new index.
        Raises Corrupt, NotFound."""
        give_up_at = time.monotonic() + COMMIT_S
        while time.monotonic() < give_up_at:
            try:
                found_at = self._index.state(model_id).applied
            except IndexDamaged:
                return self._replace(model_id)
            step = advance(ModelState(), self._journal.after(model_id, 0))
            if step.state.applied == 0:
                raise NotFound(f"nothing is published for model {model_id!r}")
            if self._index.advance(model_id, step, replace_at=found_at) == step.state.applied:
                return step.state
        raise _busy_error(model_id)

    def _replace(self, model_id: str) -> ModelState:
        """Replace the model's part of the index by the state from the journal, in one atomic step."""
        step = advance(ModelState(), self._journal.after(model_id, 0))
        self._index.advance(model_id, step, replace_at=ANYWHERE)
        # Other writers may have advanced the index between the two lines above. Their records are in the journal.
        return self._catch_up(model_id, step.state)


def _recorded_error(error: NeapError) -> NeapError:
    text = f"{error.message}; the change is recorded nevertheless, and seen as soon as the index can be written"
    return type(error)(text, reason=error.reason, metadata={**error.metadata, "is_recorded": "true"})


def _damaged_again_error(model_id: str) -> Unavailable:
    return Unavailable(f"the index of {model_id!r} was damaged again after its repair; try again", reason="INDEX_LOST")


def _busy_error(model_id: str) -> Unavailable:
    return Unavailable(f"too many concurrent writers in the registry of {model_id!r}", reason="REGISTRY_BUSY")
