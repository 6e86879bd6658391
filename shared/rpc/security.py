"""What protects a service: its certificate, and who may call it."""

from dataclasses import dataclass, field

import grpc
import structlog

from shared.errors import InvalidInput
from shared.rpc.access import Access
from shared.rpc.addresses import is_loopback, parse_listen
from shared.rpc.certificates import ServerCertificate
from shared.security_settings import SecuritySettings

log = structlog.get_logger("neap.rpc")


@dataclass(frozen=True)
class ServerSecurity:
    """`certificate` None: plain text. The default is what a service on loopback needs: nothing."""

    certificate: ServerCertificate | None = None
    access: Access = field(default_factory=Access)

    @property
    def credentials(self) -> grpc.ServerCredentials | None:
        return None if self.certificate is None else self.certificate.credentials()


def open_security(settings: SecuritySettings, listen: str) -> ServerSecurity:
    """What `settings` say for a service on `listen` (HOST:PORT).

    Raises InvalidInput: BAD_CERTIFICATE, BAD_TOKENS_FILE, BAD_CONFIGURATION for files that cannot be used, and
    TOKENS_OVER_PLAIN_TEXT for tokens that would cross a network in plain text.
    """
    security = ServerSecurity(
        None
        if settings.tls_cert is None or settings.tls_key is None
        else ServerCertificate(settings.tls_cert, settings.tls_key, settings.tls_client_ca),
        Access(settings.auth_tokens),
    )
    host, _ = parse_listen(listen)
    if security.certificate is None and not is_loopback(host):
        if settings.auth_tokens is not None and not settings.allow_plaintext_tokens:
            raise InvalidInput(
                f"tokens would reach {listen} in plain text: give --tls-cert and --tls-key, listen on loopback, or, where"
                " something else encrypts the way (a service mesh), --allow-plaintext-tokens",
                reason="TOKENS_OVER_PLAIN_TEXT",
            )
        log.warning("listening without TLS beyond loopback", listen=listen)
    if settings.auth_tokens is None and settings.tls_client_ca is None and not is_loopback(host):
        log.warning("anyone who reaches this address may call everything", listen=listen)
    return security
