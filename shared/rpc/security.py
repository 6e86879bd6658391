"""Certificate and access rules of a service, from its settings."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import structlog
from neap_client.addresses import is_loopback
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.errors import InvalidInput
from shared.rpc.access import Access
from shared.rpc.addresses import parse_listen
from shared.rpc.watched_files import WatchedFiles
from shared.security_settings import SecuritySettings

if TYPE_CHECKING:
    from shared.rpc.certificates import ServerCertificate

log = structlog.get_logger("neap.rpc")


@dataclass(frozen=True)
class ServerSecurity:
    """Without a `certificate` the service uses plain text. The default, no protection, suits a service on loopback."""

    certificate: "ServerCertificate | None" = None
    access: Access = field(default_factory=Access)

    @property
    def credentials(self) -> grpc.ServerCredentials | None:
        return None if self.certificate is None else self.certificate.credentials()


def open_security(settings: SecuritySettings, listen: str) -> ServerSecurity:
    """Build the security of a service on `listen` (HOST:PORT) from `settings`.

    Raises InvalidInput: BAD_CERTIFICATE, BAD_TOKENS_FILE, BAD_CONFIGURATION for files that cannot be used, and
    TOKENS_OVER_PLAIN_TEXT for tokens that would cross a network in plain text.
    """
    certificate = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        # Imported here: most services on loopback have no certificate, and cryptography takes long to import.
        from shared.rpc.certificates import ServerCertificate

        certificate = ServerCertificate(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    security = ServerSecurity(certificate, Access(settings.auth_tokens))
    host, _ = parse_listen(listen)
    if security.certificate is None and not is_loopback(host):
        if settings.auth_tokens is not None and not settings.allow_plaintext_tokens:
            raise InvalidInput(
                f"tokens would be sent to {listen} in plain text: set --tls-cert and --tls-key, listen on loopback, "
                "or, if something else encrypts the connection (a service mesh), set --allow-plaintext-tokens",
                reason="TOKENS_OVER_PLAIN_TEXT",
            )
        log.warning("listening without TLS beyond loopback", listen=listen)
    if settings.auth_tokens is None and settings.tls_client_ca is None and not is_loopback(host):
        log.warning("anyone who reaches this address may call everything", listen=listen)
    return security


class SecurityCollector(Collector):
    """Reads the counters of `security` at each scrape. Features that are off export no metrics."""

    def __init__(self, security: ServerSecurity) -> None:
        self._security = security

    def collect(self) -> Iterator[Metric]:
        certificate, access = self._security.certificate, self._security.access
        watched: dict[str, WatchedFiles[Any]] = {}
        if certificate is not None:
            watched["certificate"] = certificate.files
            yield GaugeMetricFamily(
                "neap_tls_certificate_expiry_time_seconds",
                "Expiry time of the certificate in use, in Unix seconds.",
                value=certificate.expiry_time_s,
            )
        if access.files is not None:
            watched["tokens"] = access.files
            refused = CounterMetricFamily(
                "neap_unauthorized_calls",
                "Calls refused because of their token or its roles, by the reason in their ErrorInfo.",
                labels=["reason"],
            )
            for reason, count in dict(access.refusals).items():
                refused.add_metric([reason], count)
            yield refused
        if watched:
            reloads = CounterMetricFamily(
                "neap_security_reloads",
                'Changes of the files of a kind. Result "refused": the new files could not be used, so the old ones '
                "stay in use.",
                labels=["kind", "result"],
            )
            for kind, files in watched.items():
                reloads.add_metric([kind, "taken"], files.num_reloads)
                reloads.add_metric([kind, "refused"], files.num_refused)
            yield reloads
