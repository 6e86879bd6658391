"""The certificate a server shows, and the authority whose clients it lets in, from files that may be rotated while it runs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from shared.errors import InvalidInput
from shared.rpc.watched_files import WatchedFiles


@dataclass(frozen=True)
class Certificate:
    """Checked: the key is that of the first certificate, which has not expired. `expiry_time_s` in Unix seconds."""

    configuration: Any
    expiry_time_s: float


class ServerCertificate:
    """PEM files `certificate` (the server's own first, then intermediates), `key`, and `client_authority` for mutual TLS.

    They are looked at again at every new connection: what is on disk then holds for it, or, where that does not fit together, what
    was good last. Connections that are open stay as they are. Raises InvalidInput (BAD_CERTIFICATE, BAD_CONFIGURATION).
    """

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None = None) -> None:
        self.is_mutual = client_authority is not None
        paths = [certificate, key, *([client_authority] if client_authority is not None else [])]
        self.files: WatchedFiles[Certificate] = WatchedFiles(
            "certificate", paths, lambda contents: _checked(paths, contents)
        )

    @property
    def expiry_time_s(self) -> float:
        return self.files.value.expiry_time_s

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`. gRPC asks on threads of its own, before each handshake."""
        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self.files.value.configuration,
            self._changed,
            require_client_authentication=self.is_mutual,
        )
        return credentials

    def _changed(self) -> Any:
        """The configuration for the next handshake; None: as before, which gRPC's stubs do not know."""
        return self.files.value.configuration if self.files.refresh() else None


def _checked(paths: Sequence[Path], contents: Sequence[bytes]) -> Certificate:
    chain = _certificates(paths[0], contents[0])
    if _public_bytes(_key(paths[1], contents[1])) != _public_bytes(chain[0]):
        raise _bad(f"{paths[1]} is not the key of the first certificate in {paths[0]}")
    expiry_time_s = chain[0].not_valid_after_utc.timestamp()
    if expiry_time_s <= time.time():
        raise _bad(
            f"the certificate in {paths[0]} expired on {chain[0].not_valid_after_utc:%F %T} UTC"
        )
    roots: bytes | None = None
    if len(contents) > 2:
        _certificates(paths[2], contents[2])
        roots = contents[2]
    pairs = [(contents[1], contents[0])]
    return Certificate(grpc.ssl_server_certificate_configuration(pairs, roots), expiry_time_s)


def _certificates(path: Path, data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise _bad(f"{path} holds no whole certificate in PEM form") from error


def _key(path: Path, data: bytes) -> Any:
    try:
        return load_pem_private_key(data, password=None)
    except TypeError as error:  # which is how the library says so
        raise _bad(f"{path} is encrypted; the key must come without a password") from error
    except Exception as error:  # ValueError, UnsupportedAlgorithm: nothing of it may be shown
        raise _bad(f"{path} holds no private key in PEM form") from error


def _public_bytes(holder: Any) -> bytes:
    public: bytes = holder.public_key().public_bytes(
        Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    )
    return public


def _bad(message: str) -> InvalidInput:
    return InvalidInput(message, reason="BAD_CERTIFICATE")
