"""Opens the registry that a setting names."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from shared.errors import InvalidInput
from shared.registry.address import SCHEMES, SharedAddress
from shared.registry.base import Registry
from shared.registry.local import LocalRegistry
from shared.registry.shared import SharedRegistry


def open_registry(url_or_path: str) -> Registry:
    """Open the embedded registry at a path or `file:///path`, or the shared one at `redis://..` (`shared.registry.address`).

    Raises InvalidInput (BAD_REGISTRY) for any other text, and the errors of the registry's constructor.
    """
    folder = folder_of(url_or_path)
    if folder is not None:
        return LocalRegistry(folder)
    return SharedRegistry(SharedAddress.parse(url_or_path))


def folder_of(url_or_path: str) -> Path | None:
    """Return the folder of an embedded registry, None for a shared one. Raises InvalidInput (BAD_REGISTRY)."""
    if "://" not in url_or_path:
        if not url_or_path.strip():
            raise InvalidInput(
                "no registry is given: give a path or file:///path", reason="BAD_REGISTRY"
            )
        return Path(url_or_path).expanduser()
    scheme = url_or_path.partition("://")[0]
    if scheme in SCHEMES:
        return None
    if scheme != "file":
        raise InvalidInput(
            f"registry scheme {scheme[:20]!r} is not supported; supported: a path, file:///path, and "
            + ", ".join(f"{name}://" for name in SCHEMES),
            reason="BAD_REGISTRY",
        )
    parts = urlsplit(url_or_path)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidInput(
            "a file registry must be written file:///absolute/path", reason="BAD_REGISTRY"
        )
    return Path(unquote(parts.path))
