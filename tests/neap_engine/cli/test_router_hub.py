"""`neap routers push`, `pull` and `import` over a Hugging Face Hub on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from neap_engine.face import read_router
from shared.ladder.blob_names import LADDER_BLOB, MANIFEST
from shared.ladder.folder import read_ladder
from shared.registry.factory import open_registry
from tests.manifests import real_manifest
from tests.model_hub import READER, ModelHub, model_hub
from tests.router_folders import FINGERPRINT, write_router
from tests.tiers import tiered

URL = "hf://alice/tiny-router"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    with model_hub(monkeypatch) as server:
        yield server


@pytest.fixture
def published(neap, tmp_path: Path) -> list[str]:
    """The flags that name a registry with one router."""
    flags = ["--data-dir", str(tmp_path / "here")]
    neap("routers", "import", str(write_router(tmp_path / "router")), *flags, "--alias", "latest")
    return flags


def pushed(neap, published: list[str], *flags: str, code: int = 0) -> str:
    result = neap("routers", "push", URL, "--model", "tiny", *published, *flags, code=code)
    return result.stderr if code else result.stdout


def test_a_pushed_router_has_its_digest_where_it_is_imported(neap, hub, published, tmp_path):
    said = pushed(neap, published, "--base-model", "org/Tiny", "--license", "apache-2.0", "--private")
    repository = hub.repositories["alice/tiny-router"]
    assert said.endswith(f"as {URL}@{repository.branches['main']}\n")
    assert repository.is_private
    files = repository.files()
    header, card = files["README.md"].decode().split("---\n")[1:]
    assert yaml.safe_load(header) | {"tags": None} == {
        "base_model": "org/Tiny",
        "library_name": "neap",
        "license": "apache-2.0",
        "tags": None,
    }
    assert FINGERPRINT in card
    assert f"neap routers import {URL} --model tiny" in card
    neap("routers", "import", URL, "--data-dir", str(tmp_path / "there"), "--alias", "latest")
    made = open_registry(str(tmp_path / "here/registry")).get("tiny", 1)
    there = open_registry(str(tmp_path / "there/registry")).resolve("tiny", "latest")
    assert there.manifest_digest == made.manifest_digest
    neap("routers", "pull", URL, str(tmp_path / "pulled"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "pulled").iterdir()} == {
        name: files[name] for name in (LADDER_BLOB, MANIFEST)
    }
    assert read_router(URL).proposer_names == read_ladder(tmp_path / "pulled").proposer_names


def test_a_revision_is_a_branch_and_an_import_may_name_a_commit(neap, hub, published, tmp_path):
    pushed(neap, published, "--revision", "chat")
    repository = hub.repositories["alice/tiny-router"]
    assert repository.files() == {}
    commit = repository.branches["chat"]
    flags = ["--data-dir", str(tmp_path / "there")]
    for revision in ("chat", commit):
        assert "version 1 of tiny" in neap("routers", "import", f"{URL}@{revision}", *flags).stdout
    assert "[ROUTER_NOT_FOUND]" in neap("routers", "import", URL, *flags, code=1).stderr


def test_files_of_an_earlier_router_leave_with_it(neap, hub, published):
    pushed(neap, published)
    repository = hub.repositories["alice/tiny-router"]
    repository.files().update({"model.sig": b"old", "notes.txt": b"mine"})
    pushed(neap, published)
    assert {"model.sig", "notes.txt"} & {*repository.files()} == {"notes.txt"}


def test_the_card_of_a_calibrated_router_has_its_figures(tmp_path):
    from neap_engine.cli.router_card import write_card

    assert write_card(tmp_path, real_manifest(), URL, base_model="", licence="") == ""
    card = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1]).keys() == {"library_name", "tags"}
    assert "| exit at depth 0 | 0.507 | 0.507 | 1.000 | 0.788 | 52,248 |" in card
    assert "| exact / full, where it was made | 1.61 (half of the prompts: 1.15 to 1.95) |" in card
    assert "compute_dtype int8" in card
    assert "![" in card
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_a_card_without_a_base_model_is_said(neap, hub, published):
    result = neap("routers", "push", URL, "--model", "tiny", *published)
    assert "--base-model" in result.stderr


def spoil(hub: ModelHub, name: str) -> None:
    files = hub.repositories["alice/tiny-router"].files()
    files[name] = files[name][:-1] + b"\x01"


FAULTS = {
    "no repository": (lambda hub: hub.repositories.clear(), URL, "ROUTER_NOT_FOUND"),
    "no revision": (lambda hub: None, f"{URL}@v9", "REVISION_NOT_FOUND"),
    "no manifest": (lambda hub: hub.repositories["alice/tiny-router"].files().pop(MANIFEST), URL, "ROUTER_NOT_FOUND"),
    "a changed byte": (lambda hub: spoil(hub, LADDER_BLOB), URL, "CORRUPT"),
    "a huge file": (lambda hub: hub.claimed_sizes.update({LADDER_BLOB: 2 << 30}), URL, "ROUTER_TOO_LARGE"),
    "another size": (lambda hub: hub.claimed_sizes.update({LADDER_BLOB: 17}), URL, "CORRUPT"),
    "a broken hub": (lambda hub: setattr(hub, "is_broken", True), URL, "HUB_UNAVAILABLE"),
    "no name": (lambda hub: None, "hf://tiny-router", "BAD_ROUTER_URL"),
    "another scheme": (lambda hub: None, "ftp://alice/tiny-router", "BAD_ROUTER_URL"),
}


@pytest.mark.parametrize("fault", tiered(sorted(FAULTS), {"a changed byte", "a huge file", "no repository"}))
def test_what_cannot_be_imported_is_said_and_publishes_nothing(neap, hub, published, tmp_path, fault):
    pushed(neap, published)
    spoil_it, url, reason = FAULTS[fault]
    spoil_it(hub)
    result = neap("routers", "import", url, "--data-dir", str(tmp_path / "there"), "--alias", "latest", code=1)
    assert f"[{reason}]" in result.stderr
    assert "unexpected" not in result.stderr
    assert not (tmp_path / "there/registry").exists()


def test_a_router_of_other_weights_is_refused(neap, hub, published, tmp_path):
    pushed(neap, published)
    flags = ["--data-dir", str(tmp_path / "there")]
    neap("routers", "import", URL, *flags, "--fingerprint", FINGERPRINT)
    command = ["routers", "pull", URL, str(tmp_path / "pulled"), "--fingerprint", "sha256:" + "1" * 64]
    assert "[ROUTER_MISMATCH]" in neap(*command, code=1).stderr
    assert not (tmp_path / "pulled").exists()


@pytest.mark.parametrize("token", ["hf_wrong", READER])
def test_a_token_that_may_not_write_is_said(neap, hub, published, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    assert "[HUB_DENIED]" in pushed(neap, published, code=1)
    assert hub.repositories == {}
    reason = "ROUTER_NOT_FOUND" if token == READER else "HUB_DENIED"
    assert f"[{reason}]" in neap("routers", "import", URL, *published, code=1).stderr


def test_a_hub_that_may_not_be_asked_or_is_away_is_said(neap, hub, published, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in neap("routers", "import", URL, *published, code=1).stderr
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    assert "[HUB_UNAVAILABLE]" in neap("routers", "import", URL, *published, code=1).stderr
