"""Opens a client's channel to a service, with TLS and a token as configured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from shared.errors import InvalidInput
from shared.rpc.access import AUTHORIZATION_KEY
from shared.rpc.addresses import is_loopback_target, with_scheme
from shared.rpc.tracing import MetadataSender
from shared.rpc.watched_files import read_capped

BALANCING: tuple[tuple[str, Any], ...] = (
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    # A name is resolved again when a connection ends, but no more often than this. gRPC's own value is 30 s, for which a new replica
    # would get no call.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
)


@dataclass(frozen=True)
class ClientSecurity:
    """A client's TLS and token settings.

    `ca`, `certificate` and `key` are PEM files, read once per channel. `tls` alone trusts the authorities that this machine trusts.
    `server_name` is the name that the server's certificate must be valid for, if it differs from the address. `token_file` is read
    again for every call, so a rotated token is used at once. `allow_plaintext_token` allows sending the token without TLS beyond
    loopback.
    """

    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    allow_plaintext_token: bool = False

    @property
    def is_encrypted(self) -> bool:
        return self.tls or self.ca is not None or self.certificate is not None

    def read_token(self) -> str:
        """Return the token, empty if there is none.

        Raises InvalidInput: BAD_TOKEN for an empty file or characters that a header cannot carry, BAD_CONFIGURATION for a file that
        cannot be read.
        """
        token = self.token
        if self.token_file is not None:
            # A token is ASCII. latin-1 decodes any byte, and the check below rejects the others.
            token = read_capped(self.token_file).decode("latin-1").strip()
            if not token:
                raise InvalidInput(f"{self.token_file} is empty", reason="BAD_TOKEN")
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise InvalidInput("the token contains invalid characters", reason="BAD_TOKEN")
        return token


def open_channel(
    target: str, security: ClientSecurity, options: Sequence[tuple[str, Any]] = ()
) -> grpc.Channel:
    """Open a channel on which every call carries the token. `target` is HOST:PORT or any other form that gRPC accepts.

    A name is resolved by DNS, and calls are shared among all its addresses in turn.

    Raises InvalidInput: TOKEN_OVER_PLAIN_TEXT for a token that would leave this machine unencrypted, BAD_TOKEN, and
    BAD_CONFIGURATION for files that cannot be used.
    """
    has_token = bool(security.read_token())
    dialled = with_scheme(target)
    options = (*BALANCING, *options)
    if security.is_encrypted:
        if security.server_name:
            options = (*options, ("grpc.ssl_target_name_override", security.server_name))
        channel = grpc.secure_channel(dialled, _credentials(security), options=options)
    else:
        if has_token and not (security.allow_plaintext_token or is_loopback_target(target)):
            raise InvalidInput(
                f"the token would be sent to {target} in plain text: set NEAP_CLIENT_CA or NEAP_CLIENT_TLS, or, if something else"
                " encrypts the connection, NEAP_ALLOW_PLAINTEXT_TOKENS",
                reason="TOKEN_OVER_PLAIN_TEXT",
            )
        if has_token and not security.allow_plaintext_token:
            # If http_proxy is set, gRPC would send even calls to loopback through that proxy.
            options = (*options, ("grpc.enable_http_proxy", 0))
        channel = grpc.insecure_channel(dialled, options=options)
    if not has_token:
        return channel

    def token() -> Mapping[str, str]:
        return {AUTHORIZATION_KEY: f"Bearer {security.read_token()}"}

    return grpc.intercept_channel(channel, MetadataSender(token))


def _credentials(security: ClientSecurity) -> grpc.ChannelCredentials:
    def read(path: Path | None) -> bytes | None:
        return None if path is None else read_capped(path)

    credentials: grpc.ChannelCredentials = grpc.ssl_channel_credentials(
        read(security.ca), read(security.key), read(security.certificate)
    )
    return credentials
