"""Opens a client's channel to a service, with TLS as configured, and reads the token that its calls carry."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from neap_client.addresses import is_loopback_target, with_scheme
from neap_client.errors import InvalidInput
from neap_client.files import read_capped

# Of the services, too. Far above any prompt that fits a context. A service itself refuses a prompt of 10 MB with INVALID_ARGUMENT and a
# reason, which tells clients not to retry. Larger messages are refused by gRPC with RESOURCE_EXHAUSTED before they are decoded.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    # A name is resolved by DNS, and calls are shared among all its addresses in turn.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    # A name is resolved again when a connection ends, but no more often than this. gRPC's own value is 30 s, for which a new replica
    # would get no call.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # gRPC repeats only calls that the server has never begun, as when its connection ends by age. The clients decide about all
    # others, call by call.
    ("grpc.enable_retries", 1),
    # A restarted service is found within this time.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Detects a service that hangs or whose machine is gone, because it does not close its connections.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
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


def open_channel(target: str, security: ClientSecurity) -> grpc.Channel:
    """Open a channel to `target`: HOST:PORT or any other form that gRPC accepts. The caller adds the token to each call.

    Raises InvalidInput: TOKEN_OVER_PLAIN_TEXT for a token that would leave this machine unencrypted, BAD_TOKEN, and
    BAD_CONFIGURATION for files that cannot be used.
    """
    address, credentials, options = _parameters(target, security)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def open_async_channel(target: str, security: ClientSecurity) -> grpc.aio.Channel:
    """Open a channel of the running event loop, as `open_channel` does."""
    address, credentials, options = _parameters(target, security)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def _parameters(
    target: str, security: ClientSecurity
) -> tuple[str, grpc.ChannelCredentials | None, list[tuple[str, Any]]]:
    """Return address, credentials (None for plain text) and options of a channel."""
    has_token = bool(security.read_token())
    options = list(CHANNEL_OPTIONS)
    if security.is_encrypted:
        if security.server_name:
            options.append(("grpc.ssl_target_name_override", security.server_name))
        return with_scheme(target), _credentials(security), options
    is_local = is_loopback_target(target)
    if has_token and not (security.allow_plaintext_token or is_local):
        raise InvalidInput(
            f"the token would be sent to {target} in plain text: use TLS or, if something else encrypts the connection, allow it"
            " (allow_plaintext_token, NEAP_ALLOW_PLAINTEXT_TOKENS)",
            reason="TOKEN_OVER_PLAIN_TEXT",
        )
    if is_local:
        # If http_proxy is set, gRPC would send even calls to loopback through that proxy.
        options.append(("grpc.enable_http_proxy", 0))
    return with_scheme(target), None, options


def _credentials(security: ClientSecurity) -> grpc.ChannelCredentials:
    def read(path: Path | None) -> bytes | None:
        return None if path is None else read_capped(path)

    credentials: grpc.ChannelCredentials = grpc.ssl_channel_credentials(
        read(security.ca), read(security.key), read(security.certificate)
    )
    return credentials
