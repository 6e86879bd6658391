"""Bearer tokens: how they are made, and the file in which a service finds whom they belong to.

The file holds no secret that could be used, only SHA-256 digests. A line is NAME ROLES DIGEST, roles parted by commas; empty lines
and lines that begin with # do not count:

    ann  generate,calibrate  sha256:9f86d0..

A name may stand on several lines, so that a new token can be handed out before the old one is taken away. A plain hash is enough:
tokens are 256 random bits, which nobody guesses, however fast the hash.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from shared.errors import InvalidInput
from shared.rpc.callers import Caller, Role

# By which scanners for leaked secrets know one.
TOKEN_PREFIX = "neap_"
MAX_TOKEN_CHARACTERS = 512
MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class TokenEntry:
    """One line: `digest` is "sha256:<64 hex>" of the token that `caller` has."""

    caller: Caller
    digest: str

    def to_line(self) -> str:
        roles = ",".join(role for role in Role if role in self.caller.roles)
        return f"{self.caller.name} {roles} {self.digest}"


def new_token(name: str, roles: Iterable[Role]) -> tuple[str, TokenEntry]:
    """(the secret, its line). Raises InvalidInput for a name that is not valid or no role."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return token, _entry(name, ",".join(roles), digest_of_token(token), "the token")


def digest_of_token(token: str) -> str:
    """As it stands in the file."""
    return "sha256:" + hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def parse_tokens(data: bytes, name: str) -> tuple[TokenEntry, ...]:
    """The entries of a file called `name`. Raises InvalidInput (BAD_TOKENS_FILE), which names the line and never quotes it."""
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise _bad(f"{name} is not text in UTF-8") from error
    entries: dict[str, TokenEntry] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{name}, line {number}"
        if len(words) != 3:
            raise _bad(f"{where}: a line is NAME ROLES DIGEST")
        name_of_caller, roles, digest = words
        entry = _entry(name_of_caller, roles, digest, where)
        if entry.digest in entries:
            raise _bad(f"{where}: the same digest stands above")
        entries[entry.digest] = entry
    if not entries:
        raise _bad(f"{name} holds no token, so that nobody could call")
    return tuple(entries.values())


def find_caller(entries: Iterable[TokenEntry], token: str) -> Caller | None:
    """Whose token it is. Takes as long for a wrong token as for a right one, wherever it stands."""
    presented = digest_of_token(token).encode()
    found: Caller | None = None
    for entry in entries:
        if hmac.compare_digest(presented, entry.digest.encode()):
            found = entry.caller
    return found


def _entry(name: str, roles: str, digest: str, where: str) -> TokenEntry:
    if not _NAME.fullmatch(name):
        raise _bad(
            f"{where}: a name is 1 to 64 letters, digits, '.', '_', '@' and '-', beginning with a letter or digit"
        )
    try:
        chosen = frozenset(Role(role) for role in roles.split(","))
    except ValueError as error:
        raise _bad(f"{where}: roles are {', '.join(Role)}, parted by commas") from error
    if not _DIGEST.fullmatch(digest):
        raise _bad(f"{where}: a digest is sha256: and 64 hexadecimal digits")
    return TokenEntry(Caller(name, chosen), digest)


def _bad(message: str) -> InvalidInput:
    # Without the cause's text: it may quote what should have been a digest and is a token.
    return InvalidInput(message, reason="BAD_TOKENS_FILE")
