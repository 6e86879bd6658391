"""Downloads from a bucket whose connections break, stand still, or whose object changes."""

import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from typer.testing import CliRunner

from neap_engine.cli import bucket_download
from neap_engine.cli.main import app
from tests.http_servers import HttpServer, Quiet

WEIGHTS = random.Random(0).randbytes(600_000)
CONNECTION_BYTES = 150_000


@dataclass
class Bucket:
    """Holds tiny/model.safetensors. `on_get(first byte)` returns how many bytes a connection brings before it ends;
    None: it stands still."""

    weights: bytes = WEIGHTS
    e_tag: str = "one"
    on_get: Callable[[int], int | None] = lambda first: len(WEIGHTS)
    firsts: list[int] = field(default_factory=list)
    may_end: threading.Event = field(default_factory=threading.Event)

    def listing(self) -> bytes:
        return (
            "<?xml version='1.0'?><ListBucketResult><Name>models</Name><IsTruncated>false</IsTruncated><Contents>"
            "<Key>tiny/model.safetensors</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f'<ETag>"{self.e_tag}"</ETag><Size>{len(self.weights)}</Size></Contents></ListBucketResult>'
        ).encode()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    held = Bucket()

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "list-type" in self.path:
                self.answer(200, held.listing())
                return
            if self.headers["If-Match"] != f'"{held.e_tag}"':
                self.answer(412, b"")
                return
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "bytes=0-")
            first = int(asked[1])
            held.firsts.append(first)
            num_bytes = held.on_get(first)
            span = f"bytes {first}-{len(held.weights) - 1}/{len(held.weights)}"
            status = 206 if self.headers["Range"] else 200
            self.answer(status, held.weights[first:], num_bytes or 0, span)
            if num_bytes is None:
                held.may_end.wait(60)

        def answer(self, status: int, body: bytes, num_bytes: int | None = None, span: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{held.e_tag}"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            if status == 206:
                self.send_header("Content-Range", span)
            self.end_headers()
            self.wfile.write(body[:num_bytes])
            self.close_connection = True

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setattr(bucket_download, "FIRST_PAUSE_S", 0.0)
    with HttpServer(Handler).answering() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield held
        held.may_end.set()


def fetch(folder: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["models", "fetch", "s3://models/tiny", str(folder)])
    return result.exit_code, " ".join(result.output.split())


def test_a_download_goes_on_where_a_connection_broke(bucket, tmp_path):
    bucket.on_get = lambda first: CONNECTION_BYTES
    code, said = fetch(tmp_path / "tiny")
    assert code == 0, said
    assert (tmp_path / "tiny" / "model.safetensors").read_bytes() == WEIGHTS
    assert len(bucket.firsts) >= 4
    # A connection that breaks loses no more than a chunk.
    steps = [after - before for before, after in zip(bucket.firsts, bucket.firsts[1:], strict=False)]
    assert min(steps) >= CONNECTION_BYTES - bucket_download.CHUNK_BYTES
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def stop_after(bucket: Bucket, num_bytes: int) -> None:
    bucket.on_get = lambda first: num_bytes if first == 0 else 0


def test_a_later_process_goes_on_where_the_one_before_it_stopped(bucket, tmp_path, monkeypatch):
    stop_after(bucket, 400_000)
    code, said = fetch(tmp_path / "tiny")
    assert (code, "BUCKET_UNAVAILABLE" in said) == (1, True), said
    assert re.search(r"stands still at [34]\d{5} of 600000 bytes", said)
    assert not (tmp_path / "tiny").exists()
    assert len(bucket.firsts) == 1 + bucket_download.MAX_IDLE_ATTEMPTS
    bucket.firsts.clear()
    bucket.on_get = lambda first: len(WEIGHTS)
    code, said = fetch(tmp_path / "tiny")
    assert code == 0, said
    assert (tmp_path / "tiny" / "model.safetensors").read_bytes() == WEIGHTS
    assert len(bucket.firsts) == 1
    assert bucket.firsts[0] >= 400_000 - bucket_download.CHUNK_BYTES


def test_bytes_that_were_not_on_the_disk_are_fetched_again(bucket, tmp_path):
    """After the machine has ended, a file may have its length without its bytes."""
    stop_after(bucket, 400_000)
    assert fetch(tmp_path / "tiny")[0] == 1
    part = tmp_path / ".fetch-tiny" / "model" / "model.safetensors.part"
    part.write_bytes(part.read_bytes()[:200_000] + bytes(300_000))
    part.with_name("model.safetensors.synced").write_text("200000")
    bucket.on_get = lambda first: len(WEIGHTS)
    assert fetch(tmp_path / "tiny")[0] == 0
    assert bucket.firsts[-1] == 200_000
    assert (tmp_path / "tiny" / "model.safetensors").read_bytes() == WEIGHTS


def test_another_object_begins_anew(bucket, tmp_path):
    stop_after(bucket, 400_000)
    assert fetch(tmp_path / "tiny")[0] == 1
    bucket.weights, bucket.e_tag = WEIGHTS[::-1], "two"
    bucket.on_get = lambda first: len(WEIGHTS)
    bucket.firsts.clear()
    assert fetch(tmp_path / "tiny")[0] == 0
    assert bucket.firsts == [0]
    assert (tmp_path / "tiny" / "model.safetensors").read_bytes() == WEIGHTS[::-1]


def test_an_object_that_changes_meanwhile_is_not_put_together(bucket, tmp_path):
    def change(first: int) -> int:
        bucket.e_tag = "two"
        return CONNECTION_BYTES

    bucket.on_get = change
    code, said = fetch(tmp_path / "tiny")
    assert (code, "has changed" in said) == (1, True), said
    assert not (tmp_path / "tiny").exists()


def test_a_connection_that_stands_still_is_left(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_download, "STALL_S", 0.2)
    bucket.on_get = lambda first: None if first == 0 and len(bucket.firsts) == 1 else len(WEIGHTS)
    code, said = fetch(tmp_path / "tiny")
    assert code == 0, said
    assert bucket.firsts == [0, 0]
