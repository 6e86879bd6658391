"""`neap routers sweep`, for a folder and against real servers."""

from contextlib import closing

import pytest

from shared.digests import digest_of
from shared.registry.content_store import ContentStore
from shared.registry.factory import open_registry
from tests.registry_servers import SERVERS, new_place


@pytest.mark.parametrize("kind", ["folder", "bucket", SERVERS[0]])
def test_a_sweep_prints_what_it_found_and_removed(neap, request, monkeypatch, kind):
    url = new_place(kind, request)
    monkeypatch.setenv("NEAP_REGISTRY", url)
    with closing(open_registry(url)) as registry:
        registry.publish("tiny", {}, {"x": b"1"}, request_id="one")
        contents = ContentStore(registry._store)
        contents.put("blobs", b"left over")
        result = neap("routers", "sweep")
        expected = "2 objects in use, 0 unused (0 bytes) removed, 1 unused but within the grace period"
        assert expected in result.stdout
        result = neap("routers", "sweep", "--grace-hours", "0", "--dry-run")
        assert "1 unused (9 bytes) to remove" in result.stdout
        assert contents.has("blobs", digest_of(b"left over"))
        result = neap("routers", "sweep", "--grace-hours", "0")
        assert "1 unused (9 bytes) removed" in result.stdout
        assert not contents.has("blobs", digest_of(b"left over"))


@pytest.mark.parametrize("command", [("sweep",), ("rebuild-index",), ("export", "--model", "tiny", "folder")])
def test_a_command_about_a_registry_makes_none_and_names_it(neap, monkeypatch, tmp_path, command):
    monkeypatch.delenv("NEAP_REGISTRY", raising=False)
    result = neap("routers", *command, "--data-dir", tmp_path / "data", code=1)
    assert "REGISTRY_NOT_FOUND" in result.output
    assert str(tmp_path / "data" / "registry") in result.output.replace("\n", "")
    assert not (tmp_path / "data").exists()
    with closing(open_registry(str(tmp_path / "data" / "registry"))):
        pass
    result = neap("routers", "sweep", "--data-dir", tmp_path / "data")
    assert f"registry: {tmp_path / 'data' / 'registry'}" in result.stderr.replace("\n", "")
