"""Settings of an RpcServer, independent of the environment."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    listen: str = "127.0.0.1:0"
    health_listen: str = ""
    grace_s: float = 2.0
    drain_timeout_s: float = 60.0
    request_timeout_s: float = 30.0
    max_connection_age_s: float | None = None
    max_connection_age_grace_s: float | None = None
