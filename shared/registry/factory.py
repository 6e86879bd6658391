"""From a setting to a registry."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from shared.errors import InvalidInput
from shared.registry.address import SCHEMES, SharedAddress
from shared.registry.base import Registry
from shared.registry.local import LocalRegistry
from shared.registry.shared import SharedRegistry


def open_registry(url_or_path: str) -> Registry:
    """`file:///path` or a path: the embedded registry; `redis://..`: the shared one, see `shared.registry.address`.

    Raises InvalidInput (BAD_REGISTRY) for anything else, and what opening raises.
    """
    folder = folder_of(url_or_path)
    if folder is not None:
        return LocalRegistry(folder)
    return SharedRegistry(SharedAddress.parse(url_or_path))


def folder_of(url_or_path: str) -> Path | None:
    """Of an embedded registry; None for a shared one. Raises InvalidInput (BAD_REGISTRY)."""
    if "://" not in url_or_path:
        if not url_or_path.strip():
            raise InvalidInput(
                "the registry is not named: give a path or file:///path", reason="BAD_REGISTRY"
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
            "a file registry is written file:///absolute/path", reason="BAD_REGISTRY"
        )
    return Path(unquote(parts.path))
