"""A model's name on the Hugging Face Hub: what is said when the hub does not give it, and that its cache serves
instead."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from huggingface_hub import constants

from shared.errors import NeapError
from shared.model.load import load_model
from shared.model.source import arguments_of
from tests.http_servers import HttpServer, Quiet
from tests.reasons import raises
from tests.worker import save_model

NAME = "nobody/tiny"


class StubHub(HttpServer):
    """Gives every request the same answer. `asked`: the paths of the requests."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(_Handler)
        self.status, self.code, self.asked = status, code, list[str]()


class _Handler(Quiet, BaseHTTPRequestHandler):
    server: StubHub

    def do_HEAD(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        self.send_header("X-Error-Code", self.server.code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    files = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)


@pytest.fixture
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    server = StubHub(*request.param)
    use_hub(monkeypatch, server.url)
    with server.answering():
        yield server


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port refuses connections."""
    with StubHub(200, "") as server:
        use_hub(monkeypatch, server.url)


def put_into_cache(cache: Path) -> None:
    folder = cache / "models--nobody--tiny"
    save_model(folder / "snapshots" / "5")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("5")


@pytest.mark.parametrize(
    ("hub", "reason", "says"),
    [
        ((404, "RepoNotFound"), "MODEL_NOT_FOUND", "no such folder, and the Hugging Face Hub has no such model"),
        ((404, "EntryNotFound"), "MODEL_NOT_FOUND", "no config.json on the Hugging Face Hub"),
        ((403, "GatedRepo"), "MODEL_GATED", "is gated"),
        ((500, ""), "HUB_UNAVAILABLE", "answers with an error"),
    ],
    indirect=["hub"],
)  # fmt: skip
def test_the_hubs_refusal_is_named(hub: StubHub, reason: str, says: str) -> None:
    with raises(NeapError, reason, match=says):
        load_model(NAME)
    assert hub.asked == [f"/{NAME}/resolve/main/config.json"], "it is asked once"


@pytest.mark.usefixtures("nobody_answers")
def test_a_hub_that_cannot_be_reached_is_named() -> None:
    with raises(NeapError, "HUB_UNAVAILABLE", match=r"no such folder.* cannot be reached"):
        load_model(NAME)


@pytest.mark.parametrize(
    ("name", "says"), [(NAME, "HF_HUB_OFFLINE"), ("models/of/mine", "no such folder, and it is no name")]
)
def test_what_is_not_there_is_named_although_nobody_may_be_asked(name: str, says: str) -> None:
    with raises(NeapError, "MODEL_NOT_FOUND", match=says):
        load_model(name)


@pytest.mark.usefixtures("nobody_answers")
def test_what_the_cache_has_is_loaded_without_the_hub(cache: Path) -> None:
    put_into_cache(cache)
    assert load_model(NAME).num_layers > 0


@pytest.mark.parametrize("hub", [(200, "")], indirect=True)
def test_a_hub_that_answers_is_asked_for_the_files(hub: StubHub, cache: Path) -> None:
    put_into_cache(cache)
    assert arguments_of(NAME)["local_files_only"] is False
    assert len(hub.asked) == 1
