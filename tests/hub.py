"""A Hugging Face Hub on loopback: datasets as {id: {path: bytes}}, enough of its API for huggingface_hub and
datasets."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.http_servers import HttpServer, Quiet

SHA = "5" * 40


class Hub(HttpServer):
    """`gated`, `broken`: ids that answer 403 with the code of a gated dataset, or 500.
    `tokens`: (id, header) of callers that showed one."""

    def __init__(self, datasets: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(_Handler)
        self.datasets = datasets
        self.gated: frozenset[str] = frozenset()
        self.broken: frozenset[str] = frozenset()
        self.tokens: set[tuple[str, str]] = set()


@contextmanager
def hub(datasets: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    server = Hub(datasets)
    with server.answering():
        yield server


class _Handler(Quiet, BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if self.headers.get("Content-Type", "").startswith("application/json"):
            form = json.loads(next(iter(form), "{}"))
        self._answer(form.get("paths", []))

    def do_GET(self) -> None:
        self._answer([])

    def _answer(self, paths: list[str]) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        is_api = parts[0] == "api"
        parts = parts[2:] if is_api else parts[1:]
        dataset, rest = "/".join(parts[:2]), parts[2:]
        if "Authorization" in self.headers:
            self.server.tokens.add((dataset, self.headers["Authorization"]))
        if dataset in self.server.broken:
            return self._send(500, b"{}")
        if dataset in self.server.gated:
            return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        files = self.server.datasets.get(dataset)
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if not is_api:
            return self._file(files, "/".join(rest[2:]))
        if rest[:1] == ["tree"]:
            recursive = "recursive=true" in self.path.lower()
            return self._json(_tree(files, "/".join(rest[2:]), recursive=recursive))
        if rest[:1] == ["paths-info"]:
            return self._json([_entry(files, path) for path in paths if _known(files, path)])
        siblings = [{"rfilename": path} for path in files]
        return self._json({"id": dataset, "sha": SHA, "siblings": siblings, "private": False})

    def _file(self, files: Mapping[str, bytes], path: str) -> None:
        if path not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        body, headers = files[path], {"X-Repo-Commit": SHA, "ETag": f'"{hash(files[path])}"'}
        if "Range" in self.headers and self.command == "GET":
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            part = body[int(first) : int(last) + 1 if last else None]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"
            return self._send(206, part, headers)
        return self._send(200, body, headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _known(files: Mapping[str, bytes], path: str) -> bool:
    return any(name == path or name.startswith(f"{path}/") for name in files)


def _entry(files: Mapping[str, bytes], path: str) -> dict[str, Any]:
    kind = "file" if path in files else "directory"
    return {"type": kind, "oid": "0" * 40, "size": len(files.get(path, b"")), "path": path}


def _tree(files: Mapping[str, bytes], folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    prefix = f"{folder}/" if folder else ""
    found: dict[str, None] = {}
    for name in files:
        if name.startswith(prefix):
            parts = name.removeprefix(prefix).split("/")
            deepest = len(parts) if recursive else 1
            for depth in range(1, deepest + 1):
                found[prefix + "/".join(parts[:depth])] = None
    return [_entry(files, path) for path in found]
