"""A server's certificate and the authority of its clients, read from files that may be rotated while the server
runs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from shared.errors import InvalidInput
from shared.rpc.watched_files import WatchedFiles


@dataclass(frozen=True)
class CheckedCertificate:
    """A checked certificate: the key matches the first certificate, which has not expired.
    `expiry_time_s` is in Unix seconds."""

    configuration: Any
    expiry_time_s: float


class ServerCertificate:
    """PEM files `certificate` (the server's own first, then intermediates), `key`, and `client_authority` for mutual
    TLS.

    The files are read again for every new connection. If they cannot be used or do not match, the last usable version
    is used. Open connections are not affected. Raises InvalidInput (BAD_CERTIFICATE, BAD_CONFIGURATION).
    """

    def __init__(self, certificate: Path, key: Path, client_authority: Path | None = None) -> None:
        self.is_mutual = client_authority is not None
        paths = [certificate, key, *([client_authority] if client_authority is not None else [])]
        self.files: WatchedFiles[CheckedCertificate] = WatchedFiles(
            "certificate", paths, lambda contents: _checked(paths, contents)
        )

    @property
    def expiry_time_s(self) -> float:
        return self.files.value.expiry_time_s

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for `add_secure_port`. gRPC calls back on its own threads before each handshake."""
        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self.files.value.configuration, self._changed, require_client_authentication=self.is_mutual
        )
        return credentials

    def _changed(self) -> Any:
        """Return the configuration for the next handshake. None, which gRPC's stubs do not declare, means no change."""
        return self.files.value.configuration if self.files.refresh() else None


def _checked(paths: Sequence[Path], contents: Sequence[bytes]) -> CheckedCertificate:
    certificate = _certificates(paths[0], contents[0])[0]
    if _public_bytes(_key(paths[1], contents[1])) != _public_bytes(certificate):
        raise _bad(f"{paths[1]} is not the key of the first certificate in {paths[0]}")
    expiry_time_s = certificate.not_valid_after_utc.timestamp()
    if expiry_time_s <= time.time():
        raise _bad(f"the certificate in {paths[0]} expired on {certificate.not_valid_after_utc:%F %T} UTC")
    roots: bytes | None = None
    if len(contents) > 2:
        _certificates(paths[2], contents[2])
        roots = contents[2]
    pairs = [(contents[1], contents[0])]
    return CheckedCertificate(grpc.ssl_server_certificate_configuration(pairs, roots), expiry_time_s)


def _certificates(path: Path, data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise _bad(f"{path} contains no complete certificate in PEM form") from error


def _key(path: Path, data: bytes) -> Any:
    try:
        return load_pem_private_key(data, password=None)
    except TypeError as error:  # raised by the library for an encrypted key
        raise _bad(f"{path} is encrypted; the key must have no password") from error
    except Exception as error:  # ValueError, UnsupportedAlgorithm, whose texts may quote the key
        raise _bad(f"{path} contains no private key in PEM form") from error


def _public_bytes(holder: Any) -> bytes:
    public: bytes = holder.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return public


def _bad(message: str) -> InvalidInput:
    return InvalidInput(message, reason="BAD_CERTIFICATE")
