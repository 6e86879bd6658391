"""`neap routers import` publishes a complete, checked ladder or nothing; `export` writes what it reads."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from shared.ladder.artefact import BLOB, SCHEMA_VERSION, pack_ladder, unpack_ladder
from shared.ladder.blob_names import MANIFEST, STATISTICS_BLOB, blob_entry
from shared.ladder.folder import read_ladder
from shared.registry.factory import open_registry
from tests.router_folders import write_router
from tests.tiers import tiered

SHIPPED = Path(__file__).parents[3] / "bench" / "router"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_router(tmp_path / "router")


def test_the_published_version_has_the_contents_of_the_files(neap, folder, tmp_path):
    (folder / "README.md").write_text("made on a machine far away")
    result = neap("routers", "import", str(folder), "--data-dir", str(tmp_path))
    registry = open_registry(str(tmp_path / "registry"))
    made = registry.get("tiny", 1)
    assert result.stdout == f"published version 1 of tiny ({made.manifest_digest})\n"
    assert registry.aliases("tiny") == {}
    blobs = {name: registry.read_blob(made, name) for name in made.manifest["blobs"]}
    assert pack_ladder(unpack_ladder(made.manifest, blobs), {}) == pack_ladder(read_ladder(folder), {})


def test_the_same_files_again_are_the_same_version(neap, folder, tmp_path):
    registry = open_registry(str(tmp_path / "registry"))
    command = ["routers", "import", str(folder), "--registry", f"file://{tmp_path}/registry"]
    first = neap(*command, "--alias", "latest")
    assert first.stdout.endswith("\nlatest: 1\n")
    assert registry.aliases("tiny") == {"latest": 1}
    assert registry.alias_history("tiny", "latest")[0].actor
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["calibration"]["note"] = "another"
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert "version 2" in neap(*command, "--alias", "latest", "--alias", "canary").stdout
    assert registry.aliases("tiny") == {"canary": 2, "latest": 2}
    del manifest["calibration"]["note"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert "version 1" in neap(*command, "--alias", "latest").stdout
    assert registry.aliases("tiny") == {"canary": 2, "latest": 1}
    assert len(registry.list_versions("tiny")) == 2
    other = neap(*command, "--model", "org/other")
    assert "version 1 of org/other" in other.stdout


@pytest.mark.parametrize("chosen", [[], ["1"]])
def test_an_exported_router_has_the_same_digest_where_it_is_imported(neap, folder, tmp_path, chosen):
    here, there, files = tmp_path / "here", tmp_path / "there", tmp_path / "files"
    flags = ["--registry", str(here)]
    neap("routers", "import", str(folder), *flags, "--alias", "latest")
    command = ["routers", "export", str(files), *chosen, "--model", "tiny"]
    result = neap(*command, *flags)
    made = open_registry(str(here)).get("tiny", 1)
    said = f"wrote version 1 of tiny ({made.manifest_digest}) to {files}\n"
    assert result.stdout == said
    assert sorted(path.name for path in files.iterdir()) == [BLOB, MANIFEST]
    neap("routers", "import", str(files), "--registry", str(there))
    assert open_registry(str(there)).get("tiny", 1).manifest_digest == made.manifest_digest
    assert "exists" in neap(*command, *flags, code=1).stderr


def test_a_router_copied_out_of_a_registry_can_be_imported(neap, folder, tmp_path):
    """Its manifest has the key that the registry adds."""
    registry = open_registry(str(tmp_path / "registry"))
    neap("routers", "import", str(folder), "--data-dir", str(tmp_path))
    made = registry.get("tiny", 1)
    (folder / MANIFEST).write_text(json.dumps(made.manifest))
    result = neap("routers", "import", str(folder), "--data-dir", str(tmp_path / "other"))
    assert made.manifest_digest in result.stdout


STATISTICS = b"sums" * 100


def add_statistics(folder: Path, data: bytes = STATISTICS) -> None:
    digest = f"sha256:{hashlib.sha256(STATISTICS).hexdigest()}"
    recorded = {BLOB: blob_entry((folder / BLOB).read_bytes()), STATISTICS_BLOB: blob_entry(STATISTICS)}
    edit(folder, calibration={"statistics": {"digest": digest}}, blobs=recorded)
    (folder / STATISTICS_BLOB).write_bytes(data)


def test_statistics_are_carried_from_registry_to_registry(neap, folder, tmp_path):
    here, there, files = tmp_path / "here", tmp_path / "there", tmp_path / "files"
    add_statistics(folder)
    neap("routers", "import", str(folder), "--registry", str(here))
    command = ["routers", "export", str(files), "1", "--model", "tiny", "--registry", str(here)]
    neap(*command)
    assert (files / STATISTICS_BLOB).read_bytes() == STATISTICS
    neap("routers", "import", str(files), "--registry", str(there))
    first, second = (open_registry(str(here)).get("tiny", 1), open_registry(str(there)).get("tiny", 1))
    assert first.manifest_digest == second.manifest_digest
    assert open_registry(str(there)).read_blob(second, STATISTICS_BLOB) == STATISTICS


def test_a_router_may_be_imported_without_its_statistics(neap, folder, tmp_path):
    add_statistics(folder)
    flags = ["--registry", str(tmp_path / "here")]
    neap("routers", "import", str(folder), *flags)
    made = open_registry(str(tmp_path / "here")).get("tiny", 1)
    (folder / MANIFEST).write_text(json.dumps(made.manifest))
    (folder / STATISTICS_BLOB).unlink()
    neap("routers", "import", str(folder), *flags)
    assert list(open_registry(str(tmp_path / "here")).get("tiny", 2).manifest["blobs"]) == [BLOB]


def test_what_is_not_published_is_not_exported(neap, tmp_path):
    open_registry(str(tmp_path / "registry")).close()
    command = ["routers", "export", str(tmp_path / "files"), "--model", "tiny"]
    for version, reason in (("latest", "ALIAS_NOT_FOUND"), ("7", "ROUTER_VERSION_NOT_FOUND")):
        assert reason in neap(*command, version, "--data-dir", str(tmp_path), code=1).stderr
    assert not (tmp_path / "files").exists()


def test_the_registry_setting_of_the_services_is_used(neap, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("NEAP_REGISTRY", str(tmp_path / "from-environment"))
    neap("routers", "import", str(folder))
    assert open_registry(str(tmp_path / "from-environment")).get("tiny", 1)
    flags = ["--registry", str(tmp_path / "from-flag")]
    neap("routers", "import", str(folder), *flags)
    assert open_registry(str(tmp_path / "from-flag")).get("tiny", 1)
    result = neap("routers", "import", str(folder), "--registry", "http://bucket", code=1)
    assert "BAD_REGISTRY" in result.stderr


def edit(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, **changes}))


def write_unrecorded(folder: Path, data: bytes) -> None:
    """As in folders that an earlier build wrote: the manifest does not name its blobs."""
    edit(folder, blobs=None)
    (folder / BLOB).write_bytes(data)


DAMAGES = {
    "no folder": (shutil.rmtree, "manifest.json is missing [NOT_FOUND]"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "manifest.json is missing [NOT_FOUND]"),
    "no blob": (lambda f: (f / BLOB).unlink(), "ladder.safetensors is missing [CORRUPT]"),
    "no JSON": (lambda f: (f / MANIFEST).write_text("{"), "is not JSON [CORRUPT]"),
    "no text": (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe"), "is not JSON [CORRUPT]"),
    "no object": (lambda f: (f / MANIFEST).write_text("[]"), "not a JSON object [CORRUPT]"),
    "half a blob": (lambda f: write_unrecorded(f, (f / BLOB).read_bytes()[:-9]), "not safetensors [CORRUPT]"),
    "another file": (lambda f: write_unrecorded(f, b"GIF89a"), "not safetensors [CORRUPT]"),
    "a changed byte": (
        lambda f: (f / BLOB).write_bytes((f / BLOB).read_bytes()[:-1] + b"\x01"),
        "does not have the files that its manifest names [CORRUPT]",
    ),
    "fewer proposers": (lambda f: edit(f, proposers=[]), "[CORRUPT]"),
    "another width": (lambda f: edit(f, model={"id": "tiny"}), "[CORRUPT]"),
    "a later format": (lambda f: edit(f, schema_version=SCHEMA_VERSION + 1), "[SCHEMA_TOO_NEW]"),
    "a former form": (
        lambda f: edit(f, schema_version=SCHEMA_VERSION - 1),
        "calibrate the model again [SCHEMA_TOO_OLD]",
    ),
    "damaged statistics": (
        lambda f: add_statistics(f, STATISTICS[:-1]),
        "is damaged, or belongs to another router [CORRUPT]",
    ),
    "statistics that no calibration made": (
        lambda f: (f / STATISTICS_BLOB).write_bytes(STATISTICS),
        "is damaged, or belongs to another router [CORRUPT]",
    ),
    "another blob": (
        lambda f: edit(f, blobs={BLOB: {"digest": "sha256:" + "0" * 64, "size_bytes": 1}}),
        "does not have the files that its manifest names [CORRUPT]",
    ),
}


@pytest.mark.parametrize(
    "damage", tiered(sorted(DAMAGES), {"no JSON", "half a blob", "a changed byte", "a later format"})
)
def test_an_invalid_folder_publishes_nothing(neap, folder, tmp_path, damage):
    damage_folder, message = DAMAGES[damage]
    damage_folder(folder)
    result = neap("routers", "import", str(folder), "--data-dir", str(tmp_path), "--alias", "latest", code=1)
    assert result.stderr.count("\n") == 1
    assert result.stderr.rstrip().endswith(message)
    assert "unexpected" not in result.stderr
    assert open_registry(str(tmp_path / "registry")).list_versions("tiny") == []


def test_the_router_in_this_repository_can_be_imported(neap, tmp_path):
    neap("routers", "import", str(SHIPPED), "--data-dir", str(tmp_path), "--alias", "latest")
    model_id = read_ladder(SHIPPED).model.model_id
    assert open_registry(str(tmp_path / "registry")).aliases(model_id) == {"latest": 1}
