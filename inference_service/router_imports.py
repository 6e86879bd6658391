"""Imports the routers that a worker is told to start with."""

from collections.abc import Sequence
from dataclasses import replace

import structlog

from shared.errors import RouterMismatch, Unavailable
from shared.exchange.router_files import read_files
from shared.exchange.signatures import Verifier
from shared.model.loaded import LoadedModel
from shared.registry.registry import Registry

log = structlog.get_logger("neap.routers")


def import_routers(
    sources: Sequence[str], served: Sequence[LoadedModel], registry: Registry, alias: str, verifier: Verifier | None
) -> None:
    """Publishes each router under the id that its weights have here, and points `alias` at it if it is new. Blocks.

    While a source does not answer, a model that has the alias already is served with that; the log says so. Raises
    RouterMismatch for a router of weights that are not served, and as `read_files` and the registry.
    """
    known = {loaded.fingerprint: loaded.model_id for loaded in served}
    for source in sources:
        try:
            files = read_files(source, verifier=verifier)
        except Unavailable as error:
            if not all(alias in registry.aliases(loaded.model_id) for loaded in served):
                raise
            log.warning("a router cannot be fetched; the alias' version serves", source=source, reason=error.reason)
            continue
        if files.fingerprint not in known:
            raise RouterMismatch(
                f"{source} is a router of {files.model_id} ({files.fingerprint}); this worker serves "
                + ", ".join(f"{model_id} ({fingerprint})" for fingerprint, model_id in known.items()),
                metadata={"router_fingerprint": files.fingerprint},
            )
        published = replace(files, model_id=known[files.fingerprint]).publish(registry, (alias,), "worker")
        log.info("router imported", source=source, model_id=published.model_id, version=published.version)
