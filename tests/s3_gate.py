"""An HTTP proxy before an S3 server. A test sees each request and may answer it itself, or hold it."""

import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Gets method, path and headers. Returns the status to answer with, or None to hand the request on. May block.
Gate = Callable[[str, str, Mapping[str, str]], int | None]


@contextmanager
def s3_gate(target_port: int, gate: Gate) -> Iterator[str]:
    """Yields the proxy's endpoint. It hands on the `Host` that the client signed, so signatures stay valid."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status = gate(self.command, self.path, self.headers)
            headers: list[tuple[str, str]] = []
            data = b""
            if status is None:
                far = http.client.HTTPConnection("127.0.0.1", target_port, timeout=60)
                far.request(self.command, self.path, body, dict(self.headers))
                answer = far.getresponse()
                status, headers, data = answer.status, answer.getheaders(), answer.read()
                far.close()
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()
