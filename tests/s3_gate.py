"""An HTTP proxy before an S3 server. A test sees each request and may answer it itself, or hold it."""

import http.client
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.http_servers import HttpServer, Quiet

# Gets method, path and headers. Returns the status to answer with, or None to hand the request on. May block.
Gate = Callable[[str, str, Mapping[str, str]], int | None]


@contextmanager
def s3_gate(target_port: int, gate: Gate) -> Iterator[str]:
    """Yields the proxy's endpoint. It hands on the `Host` that the client signed, so signatures stay valid."""

    class Handler(Quiet, BaseHTTPRequestHandler):
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

    with HttpServer(Handler).answering() as server:
        yield server.url
