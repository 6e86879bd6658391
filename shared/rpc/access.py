"""Decides who may call which method. Every call is checked before its request message is read."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from neap_client.metadata import AUTHORIZATION_KEY

from shared.errors import NeapError, PermissionDenied, Unauthenticated
from shared.rpc.callers import Caller
from shared.rpc.roles import METHOD_ROLES, OPEN_METHODS
from shared.rpc.tokens import MAX_TOKEN_CHARACTERS, TokenEntry, find_caller, parse_tokens
from shared.rpc.watched_files import WatchedFiles

_SCHEME = "bearer "


class Access:
    """Checks the token of each call. If `tokens_file` is None, everybody may call everything.

    The file is read again for every call. A token that was removed from it is refused from the next call on; running
    calls go on. `refusals` counts refused calls by reason. Raises InvalidInput (BAD_TOKENS_FILE, BAD_CONFIGURATION).
    """

    def __init__(self, tokens_file: Path | None = None) -> None:
        self.refusals: Counter[str] = Counter()
        self.files: WatchedFiles[tuple[TokenEntry, ...]] | None = None
        if tokens_file is not None:
            self.files = WatchedFiles(
                "tokens", [tokens_file], lambda contents: parse_tokens(contents[0], str(tokens_file))
            )

    def check_call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Caller | NeapError | None:
        """Check a call of `method` ("/package.Service/Method").

        Returns the caller, or the error with which to refuse the call. None means that no token is required.
        """
        if self.files is None or method.startswith(OPEN_METHODS):
            return None
        self.files.refresh()
        try:
            return _permitted(_caller(self.files.value, metadata), method)
        except NeapError as error:
            self.refusals[error.reason] += 1
            return error


def _caller(entries: Iterable[TokenEntry], metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
    values = [value for key, value in metadata if key == AUTHORIZATION_KEY]
    if not values:
        raise Unauthenticated("the call has no token: send 'authorization: Bearer TOKEN'", reason="TOKEN_MISSING")
    value = values[0]
    # With several values, a proxy in front of the service might check one and the service another.
    if len(values) > 1 or not isinstance(value, str) or not value[:7].lower() == _SCHEME:
        raise Unauthenticated("authorization must be a single 'Bearer TOKEN'", reason="TOKEN_MALFORMED")
    token = value[len(_SCHEME) :].strip()
    caller = find_caller(entries, token) if len(token) <= MAX_TOKEN_CHARACTERS else None
    if caller is None:
        raise Unauthenticated("the service does not know this token", reason="TOKEN_UNKNOWN")
    return caller


def _permitted(caller: Caller, method: str) -> Caller:
    allowed = METHOD_ROLES.get(method, frozenset())
    if not allowed & caller.roles:
        roles = ", ".join(sorted(allowed)) or "that no token has"
        raise PermissionDenied(
            f"{method} needs a role: {roles}", reason="ROLE_MISSING", metadata={"roles": roles, "caller": caller.name}
        )
    return caller
