"""The alias operations that all backends share. Each backend implements how a change is recorded."""

from abc import abstractmethod
from collections.abc import Callable, Mapping

from shared.registry.alias_moves import AliasMove
from shared.registry.base import AliasChange, Canary
from shared.registry.contents import no_alias_error
from shared.registry.version_reader import VersionReader

Propose = Callable[[AliasChange | None], AliasChange]


class AliasOperations(VersionReader):
    """`Registry` documents each operation."""

    @abstractmethod
    def aliases(self, model_id: str) -> Mapping[str, int]: ...

    @abstractmethod
    def alias_history(self, model_id: str, alias: str) -> list[AliasChange]: ...

    @abstractmethod
    def _change_alias(self, move: AliasMove, propose: Propose) -> AliasChange:
        """Call `propose` with the alias' last change (None if there is no such alias) and record the result atomically.

        Records nothing if `propose` returns the last change itself. Calls `propose` again if another writer was faster.
        """

    def set_alias(
        self,
        model_id: str,
        alias: str,
        version: int,
        *,
        expected_version: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> AliasChange:
        """See `Registry.set_alias`. Records nothing if the alias already names the version."""
        move = AliasMove(model_id, alias, actor, reason)
        # Versions are immutable, so the check may precede the change.
        self._check_alias_target(model_id, version, must_pass=True)
        return self._change_alias(
            move, lambda last: move.to_version(last, version, expected_version)
        )

    def set_canary(
        self,
        model_id: str,
        alias: str,
        canary: Canary | None,
        *,
        expected_version: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> AliasChange:
        """See `Registry.set_canary`."""
        move = AliasMove(model_id, alias, actor, reason)
        if canary is not None:
            self._check_alias_target(model_id, canary.version, must_pass=True)
        return self._change_alias(
            move, lambda last: move.with_canary(self._known(move, last), canary, expected_version)
        )

    def promote_canary(
        self,
        model_id: str,
        alias: str,
        *,
        expected_canary: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> AliasChange:
        """See `Registry.promote_canary`."""
        move = AliasMove(model_id, alias, actor, reason)
        return self._change_alias(
            move,
            self._with_target_check(
                lambda last: move.promoted(self._known(move, last), expected_canary)
            ),
        )

    def rollback_alias(
        self,
        model_id: str,
        alias: str,
        *,
        expected_version: int | None = None,
        actor: str = "",
        reason: str = "",
    ) -> AliasChange:
        """See `Registry.rollback_alias`. Without a canary, a second rollback undoes the first."""
        move = AliasMove(model_id, alias, actor, reason)
        return self._change_alias(
            move,
            self._with_target_check(
                lambda last: move.rolled_back(
                    self._known(move, last),
                    lambda: self.alias_history(model_id, alias),
                    expected_version,
                )
            ),
        )

    def _with_target_check(self, propose: Propose) -> Propose:
        """Wrap `propose` so that it raises Corrupt (VERSION_DAMAGED) before it moves an alias to a version that cannot be read."""

        def checked(last: AliasChange | None) -> AliasChange:
            change = propose(last)
            if last is None or change.to_version != last.to_version:
                self._check_alias_target(change.model_id, change.to_version, must_pass=False)
            return change

        return checked

    def _known(self, move: AliasMove, last: AliasChange | None) -> AliasChange:
        if last is None:
            raise no_alias_error(move.model_id, move.alias, self.aliases(move.model_id))
        return last
