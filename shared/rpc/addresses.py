"""Parses addresses to listen on or to call and tells which of them are on this machine."""

import ipaddress
import re
from typing import Any

import grpc

from shared.errors import InvalidInput, Unavailable


def parse_listen(listen: str) -> tuple[str, int]:
    """Split "HOST:PORT" into (host, port). Raises InvalidInput."""
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise InvalidInput(f"listen address is {listen!r}; it must be HOST:PORT")
    return host, int(port)


def bind(server: Any, listen: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Bind `server` to `listen` and return its port. Without `credentials` it serves plain text. Raises InvalidInput, Unavailable."""
    parse_listen(listen)
    try:
        if credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise Unavailable(f"cannot listen on {listen}", reason="ADDRESS_UNAVAILABLE")
    return int(port)


def is_loopback(host: str) -> bool:
    """Return whether `host` is certainly this machine. Names other than localhost are not, because they may resolve elsewhere."""
    bare = host.removeprefix("[").removesuffix("]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def with_scheme(target: str) -> str:
    """Return `target` with the scheme dns:///, unless it has one of gRPC's schemes."""
    has_scheme = re.match(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock):|[a-z][a-z0-9+.-]*://", target)
    return target if has_scheme else f"dns:///{target}"


def is_loopback_target(target: str) -> bool:
    """Return whether all addresses of `target` are on this machine. False if an address cannot be interpreted.

    `target` has one of gRPC's forms: HOST:PORT, dns:///HOST:PORT, ipv4:ADDRESS:PORT,ADDRESS:PORT, ipv6:.., unix:PATH.
    """
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    rest = re.sub(r"^(dns:(///)?|ipv4:|ipv6:)", "", target)
    hosts = [re.sub(r":\d+$", "", address) for address in rest.split(",")]
    return all(map(is_loopback, hosts))
