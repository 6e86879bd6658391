"""Creates bearer tokens and reads the file that tells a service whom they belong to.

The file contains no usable secret, only SHA-256 digests. A line is NAME ROLES DIGEST with the roles separated by
commas, and, if the caller belongs to a pool other than the model's own, pool=NAME, or pool=* if each of its requests
names one. Empty lines and lines that begin with # are ignored:

    ann  generate,calibrate  sha256:9f86d0..
    bob  generate            sha256:2c26b4..  pool=legal

A name may have several lines, so that a new token can be handed out before the old one is removed. A plain hash
suffices because tokens are 256 random bits, which cannot be guessed however fast the hash is.
"""

import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from shared.digests import DIGEST_PATTERN, digest_of
from shared.errors import InvalidInput
from shared.pool_names import ANY_POOL, DEFAULT_POOL, check_pool
from shared.rpc.callers import Caller, Role

# Lets scanners for leaked secrets recognise a token.
TOKEN_PREFIX = "neap_"
MAX_TOKEN_CHARACTERS = 512
MAX_FILE_BYTES = 1 << 20
_POOL = "pool="
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


@dataclass(frozen=True)
class TokenEntry:
    """One line of the file. `digest` is "sha256:<64 hex>" of the caller's token."""

    caller: Caller
    digest: str

    def to_line(self) -> str:
        roles = ",".join(role for role in Role if role in self.caller.roles)
        pool = "" if self.caller.pool == DEFAULT_POOL else f" {_POOL}{self.caller.pool}"
        return f"{self.caller.name} {roles} {self.digest}{pool}"


def new_token(name: str, roles: Iterable[Role], pool: str = DEFAULT_POOL) -> tuple[str, TokenEntry]:
    """Create a token. Returns the secret and its entry.
    Raises InvalidInput for an invalid name or pool, or if no role is given."""
    token = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return token, _entry(name, ",".join(roles), digest_of_token(token), pool, "the token")


def digest_of_token(token: str) -> str:
    """Return the digest in the form of the file."""
    return digest_of(token.encode("utf-8", "surrogatepass"))


def parse_tokens(data: bytes, name: str) -> tuple[TokenEntry, ...]:
    """Parse the contents of the file `name`. Raises InvalidInput (BAD_TOKENS_FILE) with the number of the line but
    never its text."""
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
        name_of_caller, roles, digest, *more = (*words, "", "")[: max(len(words), 3)]
        if not digest or len(more) > 1 or not all(word.startswith(_POOL) for word in more):
            raise _bad(f"{where}: a line must be NAME ROLES DIGEST, or NAME ROLES DIGEST {_POOL}NAME")
        pool = more[0].removeprefix(_POOL) if more else DEFAULT_POOL
        entry = _entry(name_of_caller, roles, digest, pool, where)
        if entry.digest in entries:
            raise _bad(f"{where}: an earlier line has the same digest")
        entries[entry.digest] = entry
    if not entries:
        raise _bad(f"{name} contains no token, so nobody could call the service")
    return tuple(entries.values())


def find_caller(entries: Iterable[TokenEntry], token: str) -> Caller | None:
    """Return the owner of `token`, or None. The time does not depend on whether or where the token is found."""
    presented = digest_of_token(token).encode()
    caller: Caller | None = None
    for entry in entries:
        if hmac.compare_digest(presented, entry.digest.encode()):
            caller = entry.caller
    return caller


def _entry(name: str, roles: str, digest: str, pool: str, where: str) -> TokenEntry:
    if not _NAME.fullmatch(name):
        raise _bad(
            f"{where}: a name has 1 to 64 letters, digits, '.', '_', '@' and '-' and begins with a letter or digit"
        )
    try:
        chosen = frozenset(Role(role) for role in roles.split(","))
    except ValueError as error:
        raise _bad(f"{where}: roles are {', '.join(Role)}, separated by commas") from error
    if not DIGEST_PATTERN.fullmatch(digest):
        raise _bad(f"{where}: a digest is sha256: followed by 64 hexadecimal digits")
    try:
        return TokenEntry(Caller(name, chosen, pool if pool == ANY_POOL else check_pool(pool)), digest)
    except InvalidInput as error:
        raise _bad(f"{where}: {error.message}") from error


def _bad(message: str) -> InvalidInput:
    # The text of the cause is left out, because it may quote a token that was given in place of its digest.
    return InvalidInput(message, reason="BAD_TOKENS_FILE")
