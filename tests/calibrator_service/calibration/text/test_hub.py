"""Hub datasets are read through the Hub only. The tests use a Hub on loopback."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub import Hub, hub

# A process that imports datasets takes seconds.
pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[4]
LINES = b'{"text": "one"}\n{"text": "  "}\n{"text": "two", "n": 1}\n'
# Reads each source of standard input and writes its texts, or the reason why not.
READER = """
import json, sys
from types import SimpleNamespace
from calibrator_service.calibration.text.hub import hub_texts
from shared.errors import NeapError
for line in sys.stdin:
    try:
        source = {"config": "", "split": "", "field": "", "public_only": False, **json.loads(line)}
        print(json.dumps(list(hub_texts(SimpleNamespace(**source)))))
    except NeapError as error:
        print(json.dumps({"error": type(error).__name__, "reason": error.reason, "message": error.message}))
"""


def card(*configs: dict[str, Any]) -> bytes:
    return f"---\nconfigs: {json.dumps(list(configs))}\n---\n".encode()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's working folder, with files that it must not read."""
    folder = tmp_path_factory.mktemp("disk")
    (folder / "owner" / "plain").mkdir(parents=True)
    (folder / "owner" / "local").mkdir()
    for path in ("owner/plain/train.jsonl", "owner/local/train.jsonl", "secret.jsonl"):
        (folder / path).write_text('{"text": "SECRET"}\n')
    return folder


@pytest.fixture(scope="module")
def served(disk: Path) -> Iterator[Hub]:
    files = {
        "owner/plain": {"README.md": b"# no yaml", "train.jsonl": LINES, "test.txt": b"a\nb\n"},
        "owner/many": {
            "README.md": card(
                {"config_name": "a", "data_dir": "sub"},
                {"config_name": "b", "data_files": [{"split": "dev", "path": "b/*.csv"}]},
            ),
            "sub/x.jsonl.gz": gzip.compress(LINES),
            "b/one.csv": b"body,n\nhello,1\n",
        },
        "owner/path": {"README.md": card({"config_name": "a", "data_files": f"{disk}/*.jsonl"})},
        "owner/url": {"README.md": card({"config_name": "a", "data_files": "http://127.0.0.1:9/"})},
        "owner/up": {"README.md": card({"config_name": "a", "data_files": "../plain/*.jsonl"})},
        "owner/chain": {"README.md": card({"config_name": "a", "data_files": f"x.zip::{disk}/secret.jsonl"})},
        "owner/folder": {"README.md": card({"config_name": "a", "data_dir": str(disk)})},
        "owner/images": {"a.png": b"x"},
        "owner/empty": {"README.md": b"nothing"},
        "owner/damaged": {"train.parquet": b"no parquet at all"},
        "owner/named": {"data/train-00000-of-00001.jsonl": LINES},
        "owner/gated": {},
        "owner/broken": {},
    }
    with hub(files) as server:
        server.gated, server.broken = frozenset(["owner/gated"]), frozenset(["owner/broken"])
        yield server


SOURCES: dict[str, tuple[dict[str, Any], Any]] = {
    "a dataset, not the folder of its name": ({"name": "owner/plain"}, ["one", "two"]),
    "a split and a column": ({"name": "owner/many", "config": "b", "split": "dev", "field": "body"}, ["hello"]),
    "a text file, whole": ({"name": "owner/plain", "split": "test"}, ["a\nb\n"]),
    "a compressed file in a folder": ({"name": "owner/many", "config": "a"}, ["one", "two"]),
    "several configurations": ({"name": "owner/many"}, "DATASET_CONFIG_NOT_FOUND"),
    "no such configuration": ({"name": "owner/plain", "config": "../../x"}, "DATASET_CONFIG_NOT_FOUND"),
    "no such split": ({"name": "owner/plain", "split": "dev"}, "DATASET_SPLIT_NOT_FOUND"),
    "no such column": ({"name": "owner/plain", "field": "n"}, "FIELD_NOT_FOUND"),
    "a folder of that name": ({"name": "owner/local"}, "DATASET_NOT_FOUND"),
    "a card with a path": ({"name": "owner/path"}, "DATASET_UNSUPPORTED"),
    "a card with a URL": ({"name": "owner/url"}, "DATASET_UNSUPPORTED"),
    "a card that leaves the dataset": ({"name": "owner/up"}, "DATASET_UNSUPPORTED"),
    "a card with a chain": ({"name": "owner/chain"}, "DATASET_UNSUPPORTED"),
    "a card with a folder": ({"name": "owner/folder"}, "DATASET_UNSUPPORTED"),
    "no text": ({"name": "owner/images"}, "DATASET_UNSUPPORTED"),
    "no files": ({"name": "owner/empty"}, "DATASET_UNSUPPORTED"),
    "damaged": ({"name": "owner/damaged"}, "DATASET_UNREADABLE"),
    "gated": ({"name": "owner/gated"}, "DATASET_GATED"),
    "the Hub fails": ({"name": "owner/broken"}, "DATASET_UNAVAILABLE"),
    "allowed by name": ({"name": "owner/named", "public_only": False}, ["one", "two"]),
    "a path": ({"name": "./owner"}, "BAD_DATASET_NAME"),
    "a reader": ({"name": "json"}, "BAD_DATASET_NAME"),
}


def read(sources: list[dict[str, Any]], folder: Path, endpoint: str) -> list[Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")]),
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "hf"),
        "HF_TOKEN": "hf_of_the_operator",
    }
    result = subprocess.run(
        [sys.executable, "-c", READER],
        input="".join(json.dumps(source) + "\n" for source in sources),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=environment,
        timeout=120,
    )
    return [json.loads(line) for line in result.stdout.split("\n") if line]


@pytest.fixture(scope="module")
def answers(served: Hub, disk: Path) -> dict[str, Any]:
    sources = [{"public_only": True, **source} for source, _ in SOURCES.values()]
    return dict(zip(SOURCES, read(sources, disk, served.url), strict=True))


@pytest.mark.parametrize("what", SOURCES)
def test_texts_or_reason(answers, what):
    expected, answer = SOURCES[what][1], answers[what]
    assert (answer if isinstance(expected, list) else answer["reason"]) == expected


def test_the_token_is_sent_only_for_datasets_allowed_by_name(answers, served):
    assert answers["allowed by name"] == ["one", "two"]
    assert served.tokens == {("owner/named", "Bearer hf_of_the_operator")}


def test_an_unreachable_hub_is_unavailable(disk):
    (answer,) = read([{"name": "owner/plain"}], disk, "http://127.0.0.1:9")
    assert (answer["error"], answer["reason"]) == ("Unavailable", "DATASET_UNAVAILABLE")
