"""A job goes on from an immutable version, whose statistics it gets once and checked."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb

from calibrator_service import lineage
from calibrator_service.calibration.spec import CalibrationSpec, ParentRouter, ServedTraffic
from calibrator_service.lineage import fetch_parent, find_parent
from shared.errors import Corrupt, NotFound, PreconditionFailed
from shared.ladder.blob_names import LADDER_BLOB, STATISTICS_BLOB
from shared.registry.base import PublishedVersion
from shared.registry.factory import open_registry
from shared.registry.registry import Registry
from tests.calibrator_service.conftest import error_of
from tests.reasons import raises
from tests.registry_damage import content_path

SPEC = CalibrationSpec("tiny", max_tokens=10)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    opened = open_registry(str(tmp_path / "registry"))
    yield opened
    opened.close()


def publish(registry: Registry, number: int, **blobs: bytes) -> PublishedVersion:
    named = {LADDER_BLOB: b"ladder", **{f"{name}.safetensors": data for name, data in blobs.items()}}
    return registry.publish("tiny", {"number": number}, named, request_id=str(number))


def test_an_alias_becomes_the_version_that_it_names(registry):
    first = publish(registry, 1, statistics=b"sums")
    found = find_parent(registry, "tiny", ParentRouter(alias="latest", share=0.5))
    assert found == ParentRouter(1, "latest", first.manifest_digest, 0.5)
    publish(registry, 2, statistics=b"more sums")
    assert find_parent(registry, "tiny", ParentRouter(alias="latest")).version == 2
    assert find_parent(registry, "tiny", ParentRouter(version=1)).manifest_digest == first.manifest_digest
    with pytest.raises(NotFound):
        find_parent(registry, "other", ParentRouter(version=1))


def test_a_router_that_cannot_be_a_parent_is_refused_with_the_reason(registry):
    publish(registry, 1)
    with raises(PreconditionFailed, "NO_STATISTICS"):
        find_parent(registry, "tiny", ParentRouter(version=1))
    publish(registry, 2, statistics=b"sums")
    other = ParentRouter(version=2, manifest_digest="sha256:" + "0" * 64)
    with raises(PreconditionFailed, "PARENT_MISMATCH"):
        find_parent(registry, "tiny", other)


def test_statistics_are_fetched_once(registry, tmp_path):
    publish(registry, 1, statistics=b"sums")
    spec = replace(SPEC, parent=find_parent(registry, "tiny", ParentRouter(version=1)))
    work, url = tmp_path / "work", str(tmp_path / "registry")
    path = fetch_parent(url, spec, work).statistics
    assert path.read_bytes() == b"sums"
    assert fetch_parent(url, SPEC, work) is None
    path.write_bytes(b"damaged on this disk")
    again = fetch_parent(url, spec, work)
    assert (again.statistics.read_bytes(), again.heads) == (b"sums", None)
    shutil.rmtree(tmp_path / "registry")
    assert fetch_parent(url, spec, work).statistics == path, "a resumed job needs no registry"


def test_a_pools_job_gets_the_heads_that_its_parent_has_and_needs_no_statistics(registry, tmp_path):
    url = str(tmp_path / "registry")
    of_pool = replace(SPEC, source=ServedTraffic("legal"))
    publish(registry, 1)
    publish(registry, 2, heads=b"heads of another", statistics=b"sums")
    for version, expected in ((1, (b"", b"ladder")), (2, (b"sums", b"heads of another"))):
        work = tmp_path / str(version)
        spec = replace(of_pool, parent=find_parent(registry, "tiny", ParentRouter(version=version), "legal"))
        for _ in range(2):
            found = fetch_parent(url, spec, work)
            statistics = b"" if found.statistics is None else found.statistics.read_bytes()
            assert (statistics, found.heads.read_bytes()) == expected
            found.heads.write_bytes(b"damaged on this disk")
        # A job of the model's own, from the same parent, makes heads of its own.
        own = replace(spec, source=ServedTraffic("default"))
        assert not own.may_have_parents_heads


def test_damaged_statistics_are_found(registry, tmp_path):
    made = publish(registry, 1, statistics=b"sums")
    digest = made.manifest["blobs"][STATISTICS_BLOB]["digest"]
    path = tmp_path / "registry" / content_path("blobs", digest)
    path.write_bytes(b"summ")
    spec = replace(SPEC, parent=find_parent(registry, "tiny", ParentRouter(version=1)))
    with pytest.raises(Corrupt):
        fetch_parent(str(tmp_path / "registry"), spec, tmp_path / "work")
    assert not list((tmp_path / "work").glob("*"))


def test_statistics_above_the_limit_are_not_read(registry, tmp_path, monkeypatch):
    publish(registry, 1, statistics=b"sums")
    monkeypatch.setattr(lineage, "MAX_STATISTICS_BYTES", 3)
    spec = replace(SPEC, parent=find_parent(registry, "tiny", ParentRouter(version=1)))
    with pytest.raises(Corrupt, match="4 bytes"):
        fetch_parent(str(tmp_path / "registry"), spec, tmp_path / "work")


def statistics_of(service, version: int) -> bytes:
    with closing(open_registry(str(service.folder / "registry"))) as registry:
        return registry.read_blob(registry.get("tiny", version), STATISTICS_BLOB)


@pytest.mark.full
def test_a_job_keeps_the_version_that_its_alias_named(service):
    """The second job is killed and resumed after the alias has moved, and its request is repeated."""
    assert service.end_of(service.create("with-statistics", "one")).router_version == 1
    asked = {"parent": pb.ParentRouter(alias="latest")}
    waits = service.create("wait-once", "two", **asked)
    parent = waits.spec.parent
    assert (parent.version, parent.alias) == (1, "latest")
    assert parent.manifest_digest == service.version(1).manifest_digest
    service.wait_for(waits, pb.PHASE_COLLECTING)
    with closing(open_registry(str(service.folder / "registry"))) as registry:
        publish(registry, 7, statistics=b"other sums")
    assert service.aliases() == {"latest": 2}
    assert service.create("wait-once", "two", **asked).calibration_id == waits.calibration_id
    service.kill()
    service.start()
    ended = service.end_of(waits)
    assert (ended.state, ended.num_resumes) == (pb.STATE_SUCCEEDED, 1), ended.failure
    assert statistics_of(service, ended.router_version) == b"sums and more"
    grandchild = service.create("", "three", parent=pb.ParentRouter(version=ended.router_version))
    version = service.end_of(grandchild).router_version
    assert statistics_of(service, version) == b"sums and more and more"
    other = pb.ParentRouter(alias="latest", share=0.5)
    refused = error_of(lambda: service.create("wait-once", "two", parent=other))
    assert refused.reason == "ALREADY_EXISTS", "another share is another request"
