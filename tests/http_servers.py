"""HTTP servers on loopback, inside the test's process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet:
    """What handlers share: they log nothing, and connections stay open."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass


class HttpServer(ThreadingHTTPServer):
    """Listens on a port of its own."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def answering(self) -> Iterator["HttpServer"]:
        """Scope in which requests are answered."""
        # It looks this often whether it is to end, and the end of a test waits for that.
        thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join(60)
            self.server_close()
