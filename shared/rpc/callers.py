"""The authenticated caller of a call and the caller's roles."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from neap_client.channel import ON_BEHALF_KEY

from shared.errors import PermissionDenied
from shared.pool_names import ANY_POOL, DEFAULT_POOL, check_pool

MAX_IDENTITY_CHARACTERS = 200


class Role(StrEnum):
    """What a caller may do. No role includes another; a token lists all of its roles."""

    GENERATE = "generate"
    CALIBRATE = "calibrate"
    ADMIN = "admin"


@dataclass(frozen=True)
class Caller:
    """`name` is the name of a token, or "certificate:" and the name in a client certificate.
    No token name begins like that. `pool`: with whom it shares a router, cached prefixes and what is learned; ANY_POOL:
    with whom each of its requests says."""

    name: str
    roles: frozenset[Role]
    pool: str = DEFAULT_POOL


_caller: ContextVar[Caller | None] = ContextVar("neap_caller", default=None)


def current_caller() -> Caller | None:
    """Return the caller of the call that this task serves.
    None outside a call, and if callers are not authenticated."""
    return _caller.get()


def set_current_caller(caller: Caller | None) -> None:
    """Set the caller for the rest of this task. gRPC creates one task per call."""
    _caller.set(caller)


def certificate_caller(context: Any) -> Caller | None:
    """Return the caller named by the client certificate of this connection, with every role and any pool.
    None without a certificate.

    The name is the certificate's first subject alternative name (a SPIFFE id, a DNS name, ..), or else its common name.
    """
    identities: Sequence[bytes] = context.peer_identities() or ()
    if not identities:
        return None
    text = identities[0].decode("utf-8", "replace")[:MAX_IDENTITY_CHARACTERS]
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return Caller(f"certificate:{shown}", frozenset(Role), ANY_POOL)


def caller_name() -> str:
    """Return the name of the caller of the call that this task serves, "" if callers are not authenticated."""
    caller = current_caller()
    return "" if caller is None else caller.name


def request_pool(named: str) -> str:
    """Return the pool of a request, which may name one, of the call that this task serves: the caller's, and the
    model's own if nobody has given the caller one. Raises InvalidInput (BAD_POOL), and PermissionDenied
    (POOL_NOT_ALLOWED) for another pool than that of the caller's token. Callers that are not authenticated may name
    any."""
    caller = current_caller()
    own = ANY_POOL if caller is None else caller.pool
    if own == ANY_POOL:
        return check_pool(named or DEFAULT_POOL)
    if named not in ("", own):
        raise PermissionDenied(
            f"the request names a pool that is not {caller.name if caller else ''}'s", reason="POOL_NOT_ALLOWED"
        )
    return own


def client_key(context: Any) -> str:
    """Return the key for limits per client: the caller's name, or the peer address if callers are not authenticated.

    The address has no port: ipv4:10.0.0.7, ipv6:[::1], unix:/path.
    """
    caller = current_caller()
    if caller is not None:
        return caller.name
    peer: str = context.peer()
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


def on_behalf_of(context: Any) -> str:
    """Return the client for which the caller says that it asks, "" if for none in particular.

    Clients behind one caller divide what that caller may have. Nobody gains by saying anything here.
    """
    names = (value for key, value in context.invocation_metadata() or () if key == ON_BEHALF_KEY)
    return str(next(names, ""))[:MAX_IDENTITY_CHARACTERS]


def recorded_actor(claimed: str) -> str:
    """Return the name to record in a history: the caller and, in brackets, the person the caller claims to act for.

    If callers are not authenticated, this is `claimed` alone, unverified.
    """
    caller = current_caller()
    if caller is None:
        return claimed
    return f"{caller.name} ({claimed})" if claimed not in ("", caller.name) else caller.name


def least_priority(priority_of_roles: Mapping[Role, int]) -> int:
    """Return the lowest number among the caller's roles, those without one counting as 0. Callers that are not
    authenticated have every role."""
    caller = current_caller()
    return min(priority_of_roles.get(role, 0) for role in (caller.roles if caller else Role))


def require_role(role: Role, action: str) -> None:
    """Check a role that only some requests of a method need. Raises PermissionDenied (reason ROLE_MISSING)."""
    caller = current_caller()
    if caller is not None and role not in caller.roles:
        raise PermissionDenied(f"{action} needs the role {role}", reason="ROLE_MISSING", metadata={"roles": role.value})
