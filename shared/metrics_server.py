"""The metrics over HTTP, for Prometheus to fetch."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from prometheus_client import CollectorRegistry, start_http_server

from shared.errors import InvalidInput

log = structlog.get_logger("neap.metrics")


@contextmanager
def metrics_served(listen: str, registry: CollectorRegistry) -> Iterator[int]:
    """Answers GET /metrics on `listen` ("HOST:PORT"; port 0 picks a free one), in threads of its own, until left.

    Yields the port; 0, and no server, where `listen` is "". Raises InvalidInput (reason BAD_CONFIGURATION) when the address
    cannot be had.
    """
    if not listen:
        yield 0
        return
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        server, thread = start_http_server(int(port), addr=host, registry=registry)
    except (OSError, OverflowError) as error:
        raise InvalidInput(
            f"metrics cannot be served on {listen}: {error}", reason="BAD_CONFIGURATION"
        ) from error
    log.info("metrics listening", host=host, port=server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
