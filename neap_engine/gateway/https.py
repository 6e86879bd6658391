"""The certificate of the gateway, reloaded when its files change."""

import ssl
from pathlib import Path
from typing import Any

import structlog

from shared.errors import InvalidInput
from shared.rpc.certificates import ServerCertificate

log = structlog.get_logger("neap.gateway")


class HttpsCertificate(ServerCertificate):
    """The certificate of a gRPC service, with the same checks, for an HTTP server."""

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None = None) -> None:
        super().__init__(certificate, key, client_authority)
        self._paths = certificate, key, client_authority

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of a listener. Each handshake uses the latest usable files.
        Raises InvalidInput (BAD_CERTIFICATE)."""
        outer = current = self._load()

        def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
            nonlocal current
            if self.files.refresh():
                try:
                    current = self._load()
                except InvalidInput as error:
                    log.error("certificate not reloaded", why=error.message, reason=error.reason)
            connection.context = current

        outer.sni_callback = choose
        return outer

    def _load(self) -> ssl.SSLContext:
        certificate, key, authority = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Never asks for a password: an empty one is refused.
            context.load_cert_chain(certificate, key, password=lambda: "")
            if authority is not None:
                context.load_verify_locations(authority)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise InvalidInput(f"{certificate} and {key} cannot be used", reason="BAD_CERTIFICATE") from error
        return context
