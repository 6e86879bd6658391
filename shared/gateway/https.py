"""The certificate of the gateway, reloaded when its files change."""

import ssl
from pathlib import Path
from typing import Any

from shared.errors import InvalidInput
from shared.rpc.certificates import ServerCertificate
from shared.rpc.watched_files import WatchedFiles
from shared.security_settings import TlsSettings


def server_context(settings: TlsSettings) -> ssl.SSLContext | None:
    """Return the TLS context of the listener, or None for plain text. Each handshake uses the latest usable files.

    Raises InvalidInput (BAD_CERTIFICATE, BAD_CONFIGURATION).
    """
    certificate, key, authority = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if certificate is None or key is None:
        return None
    # Checks that key and certificate match and have not expired, with the messages of the other services.
    ServerCertificate(certificate, key, authority)
    paths = [certificate, key, *([authority] if authority is not None else [])]
    files = WatchedFiles("certificate", paths, lambda _: _context(certificate, key, authority))

    def choose(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        files.refresh()
        connection.context = files.value

    outer = _context(certificate, key, authority)
    outer.sni_callback = choose
    return outer


def _context(certificate: Path, key: Path, authority: Path | None) -> ssl.SSLContext:
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
        raise InvalidInput(
            f"{certificate} and {key} cannot be used", reason="BAD_CERTIFICATE"
        ) from error
    return context
