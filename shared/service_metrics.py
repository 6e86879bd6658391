"""What the Prometheus metrics of all services begin with, and the HTTP server that gives them."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import prometheus_client
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from shared.errors import InvalidInput

# Creation times of counters would double the number of series, and nothing uses them.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

# Connections at once, and how long one may say nothing.
MOST_SCRAPES, SCRAPE_S = 16, 10.0


class ServiceMetrics:
    """One registry with the metrics of this process. A service adds its own with `counter`, `gauge` and `histogram`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        self.counter = partial(Counter, registry=self.registry)
        self.gauge = partial(Gauge, registry=self.registry)
        self.histogram = partial(Histogram, registry=self.registry)


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
    _bound(server)
    log.info("metrics listening", host=host, port=server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _bound(server: Any) -> None:
    """Let it hold MOST_SCRAPES connections, each of them for SCRAPE_S seconds without a word: it has a thread and a
    file for each, which the service needs."""
    server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), {"timeout": SCRAPE_S})
    places = threading.BoundedSemaphore(MOST_SCRAPES)
    begin, serve, tell = server.process_request, server.process_request_thread, server.handle_error

    def process_request(request: Any, address: Any) -> None:
        if places.acquire(blocking=False):
            begin(request, address)
        else:
            server.shutdown_request(request)

    def process_request_thread(request: Any, address: Any) -> None:
        try:
            serve(request, address)
        finally:
            places.release()

    def handle_error(request: Any, address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that is silent or gone
            tell(request, address)

    server.process_request, server.process_request_thread = process_request, process_request_thread
    server.handle_error = handle_error
