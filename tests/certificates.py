"""Certificates for tests, and folders in which they lie as Kubernetes mounts a secret: files that are links through one
link."""

from pathlib import Path
from types import SimpleNamespace

import trustme

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"


def issued(authority: trustme.CA, *names: str, clients: trustme.CA | None = None) -> dict[str, bytes]:
    """File name -> PEM: a certificate for `names`, its key, and the authority of clients (`authority` if none is
    given)."""
    leaf = authority.issue_cert(*names)
    return {
        CERTIFICATE: b"".join(part.bytes() for part in leaf.cert_chain_pems),
        KEY: leaf.private_key_pem.bytes(),
        AUTHORITY: (clients or authority).cert_pem.bytes(),
    }


def write(folder: Path, contents: dict[str, bytes]) -> SimpleNamespace:
    """`contents` as plain files. Yields their paths as certificate, key, authority."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return paths_in(folder)


def paths_in(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(certificate=folder / CERTIFICATE, key=folder / KEY, authority=folder / AUTHORITY)


def mount(folder: Path, contents: dict[str, bytes]) -> SimpleNamespace:
    """As a kubelet does: the first time links are made, later all files change at once with the one link "..data"."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("..version-*")))
    version = folder / f"..version-{number}"
    write(version, contents)
    link = folder / "..data_tmp"
    link.symlink_to(version.name)
    link.rename(folder / "..data")
    for name in contents:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    return paths_in(folder)
