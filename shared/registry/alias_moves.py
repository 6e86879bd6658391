"""Computes each kind of alias change for every backend: takes the alias' last change and returns the next one.

If a change would alter nothing, the last change itself is returned and the caller records nothing. Otherwise a repeated
promotion would make the next rollback do nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.errors import Conflict, InvalidInput, PreconditionFailed
from shared.registry.base import AliasChange, Canary
from shared.registry.contents import check_expected, no_earlier_version_error
from shared.registry.names import check_alias_change, check_model_id

MAX_SHARE_PER_MILLE = 999


@dataclass(frozen=True)
class AliasMove:
    """A requested change: which alias, by whom and why. Raises InvalidInput."""

    model_id: str
    alias: str
    actor: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        check_model_id(self.model_id)
        check_alias_change(self.alias, self.actor, self.reason)

    def change(self, last: AliasChange | None, version: int, canary: Canary | None = None) -> AliasChange:
        """Build the change to `version` and `canary`.
        `last` is the alias' last change, None if the alias does not exist."""
        before = None if last is None else last.to_version
        return AliasChange(self.model_id, self.alias, before, version, self.actor, self.reason, time.time(), canary)

    def to_version(self, last: AliasChange | None, version: int, expected_version: int | None) -> AliasChange:
        """See `Registry.set_alias`."""
        check_expected(expected_version, last.to_version if last else 0, self.model_id, self.alias)
        if last is not None and (last.to_version, last.canary) == (version, None):
            return last
        return self.change(last, version)

    def with_canary(self, last: AliasChange, canary: Canary | None, expected_version: int | None) -> AliasChange:
        """See `Registry.set_canary`."""
        check_expected(expected_version, last.to_version, self.model_id, self.alias)
        if canary is None:
            self._open_canary(last)
        elif not 1 <= canary.share_per_mille <= MAX_SHARE_PER_MILLE:
            raise InvalidInput(
                f"the canary's share is {canary.share_per_mille} per mille; it must be in [1, {MAX_SHARE_PER_MILLE}]",
                reason="BAD_SHARE",
            )
        elif canary.version == last.to_version:
            raise InvalidInput(
                f"alias {self.alias!r} already names version {canary.version}, so this version cannot be its canary",
                reason="BAD_CANARY",
            )
        if canary == last.canary:
            return last
        return self.change(last, last.to_version, canary)

    def promoted(self, last: AliasChange, expected_canary: int | None) -> AliasChange:
        """See `Registry.promote_canary`."""
        canary = self._open_canary(last)
        if expected_canary is not None and expected_canary != canary.version:
            raise Conflict(
                f"the canary of alias {self.alias!r} is version {canary.version} now, not {expected_canary}",
                reason="CANARY_MOVED",
                metadata={"canary_version": str(canary.version)},
            )
        return self.change(last, canary.version)

    def rolled_back(
        self, last: AliasChange, history: Callable[[], Sequence[AliasChange]], expected_version: int | None
    ) -> AliasChange:
        """See `Registry.rollback_alias`. `history` (newest first) is called only if the last change moved no
        version."""
        check_expected(expected_version, last.to_version, self.model_id, self.alias)
        if last.canary is not None:
            return self.change(last, last.to_version)
        moved = last
        if last.from_version == last.to_version:
            moved = next(past for past in history() if past.from_version != past.to_version)
        if moved.from_version is None:
            raise no_earlier_version_error(self.model_id, self.alias, last.to_version)
        return self.change(last, moved.from_version)

    def _open_canary(self, last: AliasChange) -> Canary:
        if last.canary is None:
            raise PreconditionFailed(
                f"alias {self.alias!r} of {self.model_id!r} has no canary; all its requests get version "
                f"{last.to_version}",
                reason="NO_CANARY",
            )
        return last.canary
