"""Serves metrics over HTTP for Prometheus."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from prometheus_client import CollectorRegistry, start_http_server

from shared.errors import InvalidInput

log = structlog.get_logger("neap.metrics")


@contextmanager
def serve_metrics(listen: str, registry: CollectorRegistry) -> Iterator[int]:
    """Serve GET /metrics on `listen` ("HOST:PORT"; port 0 picks a free port) in background threads until the block is
    left.

    Yields the port. If `listen` is empty, there is no server and the port is 0. Raises InvalidInput (reason
    BAD_CONFIGURATION) if the address cannot be used.
    """
    if not listen:
        yield 0
        return
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        server, thread = start_http_server(int(port), addr=host, registry=registry)
    except (OSError, OverflowError) as error:
        raise InvalidInput(f"metrics cannot be served on {listen}: {error}", reason="BAD_CONFIGURATION") from error
    log.info("metrics listening", host=host, port=server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
