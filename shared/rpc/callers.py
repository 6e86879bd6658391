"""Who calls, as far as somebody vouches for it, and what they may do."""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shared.errors import PermissionDenied

MAX_IDENTITY_CHARACTERS = 200


class Role(StrEnum):
    """No role holds another: a token lists all it may do."""

    GENERATE = "generate"
    CALIBRATE = "calibrate"
    ADMIN = "admin"


@dataclass(frozen=True)
class Caller:
    """`name`: a token's, or "certificate:" and what a client certificate says. The two cannot be mistaken for each other."""

    name: str
    roles: frozenset[Role]


_caller: ContextVar[Caller | None] = ContextVar("neap_caller", default=None)


def current_caller() -> Caller | None:
    """Of the call this task serves. None outside a call, and where nobody vouches for callers."""
    return _caller.get()


def set_current_caller(caller: Caller | None) -> None:
    """For the rest of this task, which gRPC makes for one call alone."""
    _caller.set(caller)


def certificate_caller(context: Any) -> Caller | None:
    """The caller that a client certificate of this connection names; None without one. It has every role.

    The name is the first the certificate is for (a SPIFFE id, a DNS name, ..), or else its common name.
    """
    identities: Sequence[bytes] = context.peer_identities() or ()
    if not identities:
        return None
    text = identities[0].decode("utf-8", "replace")[:MAX_IDENTITY_CHARACTERS]
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return Caller(f"certificate:{shown}", frozenset(Role))


def client_of(context: Any) -> str:
    """What limits per client count by: the caller's name, or the address a call comes from where nobody vouches for names.

    Of an address the port is left out: ipv4:10.0.0.7, ipv6:[::1], unix:/path.
    """
    caller = current_caller()
    if caller is not None:
        return caller.name
    peer: str = context.peer()
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


def recorded_actor(claimed: str) -> str:
    """Who to name in a history: the caller, then in brackets whom the caller says it acts for. Unverified: `claimed` alone."""
    caller = current_caller()
    if caller is None:
        return claimed
    return f"{caller.name} ({claimed})" if claimed not in ("", caller.name) else caller.name


def require_role(role: Role, action: str) -> None:
    """For what only some requests of a method need. Raises PermissionDenied (reason ROLE_MISSING)."""
    caller = current_caller()
    if caller is not None and role not in caller.roles:
        raise PermissionDenied(
            f"{action} needs the role {role}", reason="ROLE_MISSING", metadata={"roles": role.value}
        )
