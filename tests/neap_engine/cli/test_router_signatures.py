"""`--sign` and `--verify` of `neap routers push`, `pull` and `import`: a signature travels with its router."""

from pathlib import Path

import pytest

from neap_engine.face import read_router
from shared.errors import PreconditionFailed
from shared.ladder.blob_names import LADDER_BLOB, MANIFEST, SIGNATURE_BLOB
from shared.registry.factory import open_registry
from tests.model_hub import model_hub
from tests.reasons import raises
from tests.router_folders import write_keys, write_router

pytest.importorskip("model_signing", reason="no model-signing: pip install 'neap-server[sign]'")
URL = "hf://alice/tiny-router"


def blobs_in(registry: Path) -> set[str]:
    return {*open_registry(str(registry)).get("tiny", 1).manifest["blobs"]}


def test_an_import_can_sign_and_its_export_is_verified_and_not_signed_anew(neap, tmp_path):
    private, public = write_keys(tmp_path)
    _, other = write_keys(tmp_path, "other")
    here, there = tmp_path / "here", tmp_path / "there"
    folder = write_router(tmp_path / "router")
    assert "[SIGNATURE_MISSING]" in neap("routers", "import", str(folder), "--verify", str(public), code=1).stderr
    neap("routers", "import", str(folder), "--registry", str(here), "--sign", str(private))
    assert blobs_in(here) == {LADDER_BLOB, SIGNATURE_BLOB}
    files = tmp_path / "files"
    neap("routers", "export", str(files), "1", "--model", "tiny", "--registry", str(here))
    command = ["routers", "import", str(files), "--registry", str(there)]
    assert "[SIGNATURE_INVALID]" in neap(*command, "--verify", str(other), code=1).stderr
    neap(*command, "--verify", str(other), "--verify", str(public))
    first, second = (open_registry(str(place)).get("tiny", 1) for place in (here, there))
    assert first.manifest_digest == second.manifest_digest
    text = (files / MANIFEST).read_text()
    (files / MANIFEST).write_text(text.replace('"passed": true', '"passed": false', 1))
    assert "[SIGNATURE_STALE]" in neap(*command, code=1).stderr
    assert "[BAD_ARGUMENT]" in neap(*command, "--certificate", str(public), code=1).stderr


def test_a_push_signs_what_it_pushes(neap, tmp_path, monkeypatch):
    private, public = write_keys(tmp_path)
    _, other = write_keys(tmp_path, "other")
    flags = ["--registry", str(tmp_path / "here")]
    neap("routers", "import", str(write_router(tmp_path / "router")), *flags)
    push = ["routers", "push", URL, "1", "--model", "tiny", *flags]
    with model_hub(monkeypatch) as hub:
        assert "[SIGNATURE_MISSING]" in neap(*push, "--verify", str(public), code=1).stderr
        assert "[SIGNATURE_INVALID]" in neap(*push, "--sign", str(private), "--verify", str(other), code=1).stderr
        assert hub.repositories == {}
        neap(*push, "--sign", str(private), "--verify", str(public))
        pulled = tmp_path / "pulled"
        neap("routers", "pull", URL, str(pulled), "--verify", str(public))
        assert {path.name for path in pulled.iterdir()} == {LADDER_BLOB, MANIFEST, SIGNATURE_BLOB}
        assert read_router(URL, verify=[other, public]).model.model_id == "tiny"
        with raises(PreconditionFailed, "SIGNATURE_INVALID"):
            read_router(URL, verify=[other])
        files = hub.repositories["alice/tiny-router"].files()
        files[MANIFEST] = files[MANIFEST].replace(b'"num_layers": 4', b'"num_layers": 5')
        pull = ["routers", "pull", URL, str(tmp_path / "again"), "--verify", str(public)]
        assert "[SIGNATURE_INVALID]" in neap(*pull, code=1).stderr
        assert not (tmp_path / "again").exists()
