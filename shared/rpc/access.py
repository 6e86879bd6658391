"""Who may call what: asked for every call before its message is looked at."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from shared.errors import NeapError, PermissionDenied, Unauthenticated
from shared.rpc.callers import Caller
from shared.rpc.roles import METHOD_ROLES, OPEN_METHODS
from shared.rpc.tokens import MAX_TOKEN_CHARACTERS, TokenEntry, find_caller, parse_tokens
from shared.rpc.watched_files import WatchedFiles

AUTHORIZATION_KEY = "authorization"
_SCHEME = "bearer "


class Access:
    """`tokens_file` None: everybody may call everything. `refusals` counts refused calls by reason.

    The file is looked at for every call, so a token that is taken out of it is refused from the next call on; calls at work go on.
    Raises InvalidInput (BAD_TOKENS_FILE, BAD_CONFIGURATION).
    """

    def __init__(self, tokens_file: Path | None = None) -> None:
        self.refusals: Counter[str] = Counter()
        self.files: WatchedFiles[tuple[TokenEntry, ...]] | None = None
        if tokens_file is not None:
            self.files = WatchedFiles(
                "tokens",
                [tokens_file],
                lambda contents: parse_tokens(contents[0], str(tokens_file)),
            )

    def judge(
        self, method: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> Caller | NeapError | None:
        """The caller of `method` ("/package.Service/Method"), None where nobody asks, or the error to refuse the call with."""
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
        raise Unauthenticated(
            "the call carries no token: send 'authorization: Bearer TOKEN'", reason="TOKEN_MISSING"
        )
    value = values[0]
    # Of several, a proxy before the service may have checked another than the service would.
    if len(values) > 1 or not isinstance(value, str) or not value[:7].lower() == _SCHEME:
        raise Unauthenticated("authorization must be one 'Bearer TOKEN'", reason="TOKEN_MALFORMED")
    token = value[len(_SCHEME) :].strip()
    caller = find_caller(entries, token) if len(token) <= MAX_TOKEN_CHARACTERS else None
    if caller is None:
        raise Unauthenticated("the token is not known here", reason="TOKEN_UNKNOWN")
    return caller


def _permitted(caller: Caller, method: str) -> Caller:
    allowed = METHOD_ROLES.get(method, frozenset())
    if not allowed & caller.roles:
        roles = ", ".join(sorted(allowed)) or "that no token has"
        raise PermissionDenied(
            f"{method} needs a role: {roles}",
            reason="ROLE_MISSING",
            metadata={"roles": roles, "caller": caller.name},
        )
    return caller
