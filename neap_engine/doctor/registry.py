"""The check of the registry."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from neap_engine.doctor.finding import Finding
from shared.registry.address import RegistryAddress
from shared.registry.factory import folder_of, open_registry
from shared.registry.registry import Registry


def registry(url: str, model_ids: Sequence[str]) -> Finding:
    """Opens the registry as the services do, reads the newest versions of the models, and writes a probe.

    A folder that does not exist is left to the first service. Raises the registry's errors.
    """
    folder = folder_of(url)
    if folder is not None and not folder.exists():
        return _future_folder(folder)
    with closing(open_registry(url)) as opened:
        newest = {model_id: _newest(opened, model_id) for model_id in model_ids}
        opened.check_writable()
    where = str(folder) if folder is not None else _described(RegistryAddress.parse(url))
    routers = [
        f"{model_id} has {f'version {number}' if number else 'no router yet: exact drafts by look-up alone'}"
        for model_id, number in newest.items()
    ]
    detail = "; ".join([f"{where} can be read and written", *routers])
    return Finding("registry", "ok", detail, facts={"newest_versions": newest})


def _future_folder(folder: Path) -> Finding:
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    with TemporaryDirectory(dir=above, prefix=".neap-"):
        pass
    detail = f"{folder} does not exist; the first service that starts creates it"
    return Finding("registry", "ok", detail, facts={"newest_versions": {}})


def _newest(opened: Registry, model_id: str) -> int | None:
    listed = opened.list_versions(model_id, limit=1)
    return listed[0].version if listed else None


def _described(address: RegistryAddress) -> str:
    # Without the URL of Redis, which may contain a password.
    index = "Redis with " if address.redis_url else ""
    return f"{index}s3://{address.bucket}/{address.prefix}".rstrip("/")
