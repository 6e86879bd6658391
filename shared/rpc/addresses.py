"""Addresses to listen on and to call: how they are parted, and which of them never leave this machine."""

import ipaddress
import re
from typing import Any

import grpc

from shared.errors import InvalidInput, Unavailable


def parse_listen(listen: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT". Raises InvalidInput."""
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise InvalidInput(f"listen address is {listen!r}; it must be HOST:PORT")
    return host, int(port)


def bind(server: Any, listen: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """The port that `server` now has; without `credentials` it speaks plain text. Raises InvalidInput, Unavailable."""
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
    """Whether `host` is this machine for sure. A name other than localhost is not: who answers for it may change."""
    bare = host.removeprefix("[").removesuffix("]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def is_loopback_target(target: str) -> bool:
    """Whether all of what a channel to `target` may call is this machine. What is not understood is not.

    `target` is what gRPC takes: HOST:PORT, dns:///HOST:PORT, ipv4:ADDRESS:PORT,ADDRESS:PORT, ipv6:.., unix:PATH.
    """
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    rest = re.sub(r"^(dns:(///)?|ipv4:|ipv6:)", "", target)
    hosts = [re.sub(r":\d+$", "", address) for address in rest.split(",")]
    return all(map(is_loopback, hosts))
