"""A Hugging Face Hub on loopback that keeps repositories of models: as much of its API as huggingface_hub needs to make
repositories and branches, commit files (small ones in the commit, others by LFS) and read them."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from huggingface_hub import constants

from tests.http_servers import HttpServer, Quiet

WRITER, READER = "hf_writer", "hf_reader"
WRONG_TOKEN = {"X-Error-Message": "Invalid credentials in Authorization header"}
LFS = (".safetensors", ".png")


@dataclass
class Repository:
    is_private: bool = False
    # By name, the newest last; a commit's name is its number in 40 digits.
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {f"{0:040}": {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": f"{0:040}"})

    def files(self, revision: str = "main") -> dict[str, bytes] | None:
        return self.commits.get(self.branches.get(revision, revision))


class ModelHub(HttpServer):
    """`claimed_sizes`: of files, instead of the true ones. `is_broken`: every answer is 500."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.claimed_sizes: dict[str, int] = {}
        self.is_broken = False


@contextmanager
def model_hub(patch: pytest.MonkeyPatch, token: str = WRITER) -> Iterator[ModelHub]:
    """The Hub that huggingface_hub asks within the scope, with `token` in its usual place."""
    server = ModelHub()
    with server.answering():
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setenv("HF_TOKEN", token)
        yield server


class _Handler(Quiet, BaseHTTPRequestHandler):
    server: ModelHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.server.is_broken:
            return self._json({}, 500)
        if self._token() not in (WRITER, READER, ""):
            return self._json({}, 401, WRONG_TOKEN)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/(.+))?", path):
            return self._info(match[1], match[3] or "main")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(match[1], match[2], match[3])
        return self._json({}, 404)

    def do_PUT(self) -> None:
        body = self._body()
        self.server.large[hashlib.sha256(body).hexdigest()] = body
        self._json({})

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        if self.server.is_broken:
            return self._json({}, 500)
        if self._token() not in (WRITER, READER):
            return self._json({}, 401, WRONG_TOKEN)
        if self._token() == READER:
            return self._json({"error": "You don't have the rights"}, 403)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            header = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            errors = [] if "library_name" in header else [{"message": "no library_name"}]
            return self._json({"errors": errors, "warnings": []}, 400 if errors else 200)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._json({"transfer": "basic", "objects": [self._upload(o) for o in json.loads(body)["objects"]]})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/(.+)", path)
        repository = self.server.repositories.get(match[1]) if match else None
        if match is None or repository is None:
            return self._json({}, 404, {"X-Error-Code": "RepoNotFound"})
        if match[2] == "branch":
            is_there = match[3] in repository.branches
            repository.branches.setdefault(match[3], repository.branches["main"])
            return self._json({}, 409 if is_there else 200)
        if match[2] == "preupload":
            paths = [each["path"] for each in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(LFS) else "regular" for path in paths}
            entries = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self._json({"files": entries})
        return self._commit(match[1], match[3], [json.loads(line) for line in body.splitlines()])

    def _create(self, wanted: Mapping[str, Any]) -> None:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        is_there = name in self.server.repositories
        self.server.repositories.setdefault(name, Repository("private" in (wanted.get("visibility"), *wanted)))
        self._json({"url": f"{self.server.url}/{name}"}, 409 if is_there else 200)

    def _upload(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        href = f"{self.server.url}/lfs/{wanted['oid']}"
        return {**wanted, "actions": {"upload": {"href": href}}}

    def _commit(self, owned_name: str, branch: str, operations: list[dict[str, Any]]) -> None:
        repository = self.server.repositories[owned_name]
        files = dict(repository.files(branch) or {})
        for value in ({"kind": operation["key"], **operation["value"]} for operation in operations[1:]):
            if value["kind"] == "deletedFile":
                del files[value["path"]]
            elif value["kind"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        name = f"{len(repository.commits):040}"
        repository.commits[name] = files
        repository.branches[branch] = name
        self._json({"success": True, "commitOid": name, "commitUrl": f"{self.server.url}/{owned_name}/commit/{name}"})

    def _info(self, name: str, revision: str) -> None:
        repository = self.server.repositories.get(name)
        if repository is None:
            return self._json({}, 404, {"X-Error-Code": "RepoNotFound"})
        if (files := repository.files(revision)) is None:
            return self._json({}, 404, {"X-Error-Code": "RevisionNotFound"})
        siblings = [
            {"rfilename": path, "size": self.server.claimed_sizes.get(path, len(data))} for path, data in files.items()
        ]
        sha = repository.branches.get(revision, revision)
        return self._json({"id": name, "sha": sha, "siblings": siblings, "private": repository.is_private})

    def _file(self, name: str, revision: str, path: str) -> None:
        files = self.server.repositories[name].files(revision) or {}
        headers = {"X-Repo-Commit": revision, "ETag": f'"{hashlib.sha256(files[path]).hexdigest()}"'}
        self._send(200, files[path], headers)

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
