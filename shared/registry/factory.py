"""From a setting to a registry."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from shared.errors import InvalidInput
from shared.registry.base import Registry
from shared.registry.local import LocalRegistry


def open_registry(url_or_path: str) -> Registry:
    """`file:///path` or a path: the embedded registry. Raises InvalidInput for anything else, and what opening raises."""
    if "://" not in url_or_path:
        if not url_or_path.strip():
            raise InvalidInput(
                "the registry is not named: give a path or file:///path", reason="BAD_REGISTRY"
            )
        return LocalRegistry(Path(url_or_path).expanduser())
    parts = urlsplit(url_or_path)
    if parts.scheme != "file":
        raise InvalidInput(
            f"registry scheme {parts.scheme!r} is not supported; supported now: file:///path, or a path",
            reason="BAD_REGISTRY",
        )
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidInput(
            "a file registry is written file:///absolute/path", reason="BAD_REGISTRY"
        )
    return LocalRegistry(Path(unquote(parts.path)))
