"""Opens a client's channel to a service, with TLS as configured, and gives its calls their metadata: a token, and the
context of the caller's trace.

Calls carry `traceparent` if the package opentelemetry-api is installed and a span is current. The W3C propagator is
used explicitly, because the API's global one depends on the environment.
"""

import json
import logging
import os
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from neap_client.addresses import is_loopback_target, with_scheme
from neap_client.affinity import WORKER_KEY
from neap_client.errors import InvalidInput

MAX_FILE_BYTES = 1 << 20


def read_capped(path: Path) -> bytes:
    """Read a file. Raises InvalidInput (BAD_CONFIGURATION) if it cannot be read or is larger than MAX_FILE_BYTES."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}", reason="BAD_CONFIGURATION") from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(f"{path} is larger than {MAX_FILE_BYTES} bytes", reason="BAD_CONFIGURATION")
    return data


try:
    from opentelemetry.trace.propagation import tracecontext
except ImportError:  # an optional dependency
    tracecontext = None  # type: ignore[assignment]

AUTHORIZATION_KEY = "authorization"
REQUEST_ID_KEY = "x-request-id"
# The client for whom a caller asks, as a gateway does. Such clients divide what the caller may have.
ON_BEHALF_KEY = "x-neap-client"

Metadata = Sequence[tuple[str, str]]


def trace_context() -> Mapping[str, str]:
    """Return the current span's context as metadata (`traceparent`). Empty if there is no span or no OpenTelemetry."""
    carrier: dict[str, str] = {}
    if tracecontext is not None:
        tracecontext.TraceContextTextMapPropagator().inject(carrier)
    return carrier


# The services' limit, too. Far above any prompt that fits a context. A service itself refuses a prompt of 10 MB with
# INVALID_ARGUMENT and a reason, which tells clients not to retry. Larger messages are refused by gRPC with
# RESOURCE_EXHAUSTED before they are decoded.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    # A name is resolved again when a connection ends, but no more often than this. gRPC's own value is 30 s, for which
    # a new replica would get no call.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # gRPC repeats only calls that the server has never begun, as when its connection ends by age. The clients decide
    # about all others, call by call.
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

# gRPC's way to say where a call goes: an address stands at the hashes of ADDRESS_0, ADDRESS_1 .. on a ring, as in
# Envoy, and a call with ADDRESS_0 in its metadata goes there, or to the next one on the ring if there is no connection.
# gRPC reads the metadata only with the variable (its proposal A76).
_BY_ADDRESS = {"ring_hash_experimental": {"requestHashHeader": WORKER_KEY}}
_BY_ADDRESS_VARIABLE = "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY"
# Such a call waits for a connection to its worker. After this time it goes to the next worker on the ring.
_CONNECT_MS = 1_000

C = TypeVar("C")
log = logging.getLogger("neap_client")


@dataclass(frozen=True)
class ClientSecurity:
    """A client's TLS and token settings.

    `ca`, `certificate` and `key` are PEM files; a certificate needs its key. `tls` alone trusts the authorities that
    this machine trusts. `server_name` is the name that the server's certificate must be valid for, if it differs from
    the address. `token_file` has the token. All files are read again for every call, so rotated ones are used at once.
    `allow_plaintext_token` allows sending the token without TLS beyond loopback. Raises InvalidInput
    (BAD_CONFIGURATION) for a certificate without a key, or a key alone.
    """

    tls: bool = False
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    allow_plaintext_token: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidInput("certificate and key must be given together", reason="BAD_CONFIGURATION")

    @property
    def is_encrypted(self) -> bool:
        return self.tls or self.ca is not None or self.certificate is not None

    def read_token(self) -> str:
        """Return the token, empty if there is none.

        Raises InvalidInput: BAD_TOKEN for an empty file or characters that a header cannot carry, BAD_CONFIGURATION for
        a file that cannot be read.
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

    def read_certificates(self) -> tuple[bytes | None, ...]:
        """Return the contents of `ca`, `key` and `certificate`.
        Raises InvalidInput (BAD_CONFIGURATION) for a file that cannot be read."""
        paths = (self.ca, self.key, self.certificate)
        return tuple(None if path is None else read_capped(path) for path in paths)


class RenewedChannel(Generic[C]):
    """A client's channel, opened anew when the files of its certificates have changed. Thread-safe.

    Running calls end on the channel on which they began, which gRPC closes once nothing uses it. Files that cannot be
    used change nothing and are logged once. The constructor raises InvalidInput as `open_new` does.
    """

    def __init__(self, security: ClientSecurity, open_new: Callable[[], C]) -> None:
        self._security = security
        self._open_new = open_new
        self._lock = threading.Lock()
        self._refused = ""
        self._files = security.read_certificates()
        self.latest = open_new()

    def current(self) -> C:
        """Return the channel for the next call. Raises nothing."""
        with self._lock:
            try:
                files = self._security.read_certificates()
                if files != self._files:
                    self.latest = self._open_new()
                    self._files = files
                    log.info("certificates reloaded")
                self._refused = ""
            except InvalidInput as error:
                if error.message != self._refused:
                    self._refused = error.message
                    log.error("certificates not reloaded: %s [%s]", error.message, error.reason)
            return self.latest


def open_channel(
    target: str, security: ClientSecurity, health_service: str | None = None, *, by_address: bool = False
) -> grpc.Channel:
    """Open a channel to `target`: HOST:PORT or any other form that gRPC accepts.
    The caller adds the token to each call.

    With `health_service`, calls go only to addresses whose health check of this service says SERVING. They go to these
    in turn, or, `by_address`, to the one that their WORKER_KEY names. Raises
    InvalidInput: TOKEN_OVER_PLAIN_TEXT for a token that would leave this machine unencrypted, BAD_TOKEN,
    BAD_CERTIFICATE for certificates that cannot be used, and BAD_CONFIGURATION for files that cannot be read.
    """
    address, credentials, options = _parameters(target, security, health_service, by_address)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def open_async_channel(
    target: str, security: ClientSecurity, health_service: str | None = None, *, by_address: bool = False
) -> grpc.aio.Channel:
    """Open a channel of the running event loop, as `open_channel` does."""
    address, credentials, options = _parameters(target, security, health_service, by_address)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def _parameters(
    target: str, security: ClientSecurity, health_service: str | None, by_address: bool
) -> tuple[str, grpc.ChannelCredentials | None, list[tuple[str, Any]]]:
    """Return address, credentials (None for plain text) and options of a channel."""
    has_token = bool(security.read_token())
    balancing: dict[str, Any] = {"round_robin": {}}
    if by_address:
        os.environ.setdefault(_BY_ADDRESS_VARIABLE, "true")
        balancing = _BY_ADDRESS
    service_config: dict[str, Any] = {"loadBalancingConfig": [balancing]}
    if health_service is not None:
        service_config["healthCheckConfig"] = {"serviceName": health_service}
    options = [*CHANNEL_OPTIONS, ("grpc.service_config", json.dumps(service_config))]
    if by_address:
        options.append(("grpc.min_reconnect_backoff_ms", _CONNECT_MS))
    if security.is_encrypted:
        if security.server_name:
            options.append(("grpc.ssl_target_name_override", security.server_name))
        return with_scheme(target), _credentials(security), options
    is_local = is_loopback_target(target)
    if has_token and not (security.allow_plaintext_token or is_local):
        raise InvalidInput(
            f"the token would be sent to {target} in plain text: use TLS or, if something else encrypts the "
            "connection, allow it (allow_plaintext_token, NEAP_ALLOW_PLAINTEXT_TOKENS)",
            reason="TOKEN_OVER_PLAIN_TEXT",
        )
    if is_local:
        # If http_proxy is set, gRPC would send even calls to loopback through that proxy.
        options.append(("grpc.enable_http_proxy", 0))
    return with_scheme(target), None, options


def _credentials(security: ClientSecurity) -> grpc.ChannelCredentials:
    files = security.read_certificates()
    # gRPC takes any bytes, and then every call fails without saying why.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if security.ca is not None:
            context.load_verify_locations(security.ca)
        if security.certificate is not None:
            # Never asks for a password: an empty one is refused.
            context.load_cert_chain(security.certificate, security.key, password=lambda: "")
    except OSError as error:
        paths = [str(path) for path in (security.ca, security.certificate, security.key) if path]
        raise InvalidInput(
            f"{', '.join(paths)} cannot be used: each must be complete and in PEM form, and the key must belong to the "
            "certificate and have no password",
            reason="BAD_CERTIFICATE",
        ) from error
    credentials: grpc.ChannelCredentials = grpc.ssl_channel_credentials(*files)
    return credentials
