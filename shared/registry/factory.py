"""Opens the registry that a setting names."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from shared.errors import InvalidInput
from shared.files import StepHook
from shared.registry.address import BUCKET_SCHEME, REDIS_SCHEMES, RegistryAddress
from shared.registry.bucket_store import BucketStore
from shared.registry.folder_store import FolderStore
from shared.registry.index import Index, MemoryIndex
from shared.registry.registry import Registry
from shared.registry.store import Store, check_schema

# How old an answer about a bucket may be without Redis, and how often the bucket is asked while an event is awaited.
BUCKET_FRESHNESS_S, BUCKET_POLL_S = 0.5, 1.0
FOLDER_POLL_S = 0.05


def open_registry(
    url_or_path: str, *, freshness_s: float | None = None, step: StepHook = lambda name: None
) -> Registry:
    """Open a registry in a folder (a path or `file:///path`) or in a bucket (`s3://..`, or `redis://..` with an index
    in Redis).

    `freshness_s`: for how long answers are given without another look into the journal, None for the index's own
    default. Writers always look. `step`: see `Registry`. `shared.registry.address` describes the URLs. Raises
    InvalidInput (BAD_REGISTRY) for any other text, and the errors of `Registry`.
    """
    folder = folder_of(url_or_path)
    store = open_store(url_or_path, step=step)
    index: Index
    if folder is not None:
        index = MemoryIndex(freshness_s=0.0, poll_s=FOLDER_POLL_S)
    else:
        address = RegistryAddress.parse(url_or_path)
        if address.redis_url:
            # Imported here: other registries start without its client.
            from shared.registry.redis_index import RedisIndex

            index = RedisIndex(address)
        else:
            index = MemoryIndex(freshness_s=BUCKET_FRESHNESS_S, poll_s=BUCKET_POLL_S)
    if freshness_s is not None:
        index.freshness_s = freshness_s
    return Registry(store, index, step=step)


def open_store(url_or_path: str, *, step: StepHook = lambda name: None) -> Store:
    """Open the folder or the bucket of a registry alone. Raises as `open_registry`."""
    folder = folder_of(url_or_path)
    if folder is None:
        return BucketStore(RegistryAddress.parse(url_or_path))
    if (folder / "index.db").exists():
        check_schema(1)
    return FolderStore(folder, step=step)


def folder_of(url_or_path: str) -> Path | None:
    """Return the folder of a registry, None for one in a bucket. Raises InvalidInput (BAD_REGISTRY)."""
    if "://" not in url_or_path:
        if not url_or_path.strip():
            raise InvalidInput("no registry is given: give a path or file:///path", reason="BAD_REGISTRY")
        return Path(url_or_path).expanduser()
    scheme = url_or_path.partition("://")[0]
    if scheme in (BUCKET_SCHEME, *REDIS_SCHEMES):
        return None
    if scheme != "file":
        raise InvalidInput(
            f"registry scheme {scheme[:20]!r} is not supported; supported: a path, file:///path, and "
            + ", ".join(f"{name}://" for name in (BUCKET_SCHEME, *REDIS_SCHEMES)),
            reason="BAD_REGISTRY",
        )
    parts = urlsplit(url_or_path)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidInput("a file registry must be written file:///absolute/path", reason="BAD_REGISTRY")
    return Path(unquote(parts.path))
