"""Parses addresses to listen on, binds servers to them, and says how many connections these take."""

import resource
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
    """Bind `server` to `listen` and return its port. Without `credentials` it serves plain text.
    Raises InvalidInput, Unavailable."""
    parse_listen(listen)
    try:
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise Unavailable(f"cannot listen on {listen}", reason="ADDRESS_UNAVAILABLE")
    return int(port)


MAX_CONNECTIONS = 4096
# Open files that are no connections of clients: those to other services, for logs and metrics, of the interpreter.
OTHER_FILES = 128


def max_connections() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(2, min(MAX_CONNECTIONS, limit - OTHER_FILES))
