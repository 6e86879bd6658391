"""RouterService over real gRPC, on a registry to which this process writes, too."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from neap_client.router.v1 import router_pb2 as pb

from shared.errors import Conflict, Corrupt
from shared.registry.factory import open_registry
from shared.registry.registry import Registry
from tests.calibrator_service.conftest import Service, error_of
from tests.manifests import real_manifest
from tests.waiting import wait_until

MANIFEST = real_manifest()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("routers"), "--model", "tiny=/nowhere")
    yield made
    assert made.terminate() == 0


@pytest.fixture
def registry(service: Service) -> Iterator[Registry]:
    opened = open_registry(str(service.folder / "registry"))
    yield opened
    opened.close()


@pytest.fixture
def publish(registry: Registry, request: pytest.FixtureRequest) -> Callable[..., int]:
    """Publishes for a model named after the test, so that tests share a service but no versions."""

    def one(number: int = 0, **options: Any) -> int:
        return registry.publish(
            model(request),
            {**MANIFEST, "number": number, "of": model(request)},
            {"x": f"weights {number}".encode() * 100},
            request_id=f"{model(request)}-{number}",
            **options,
        ).version

    return one


def model(request: pytest.FixtureRequest) -> str:
    return "acme/" + request.node.name.split("[")[0].replace("_", "-")


def test_versions(service, publish, request):
    for number in range(5):
        publish(number)
    seen, token = [], ""
    for _ in range(3):
        asked = pb.ListVersionsRequest(model_id=model(request), page_size=2, page_token=token)
        page = service.routers.ListVersions(asked)
        seen += [version.version for version in page.versions]
        assert not any(version.manifest_json for version in page.versions)
        token = page.next_page_token
    assert (seen, token) == ([5, 4, 3, 2, 1], "")
    got = service.routers.GetVersion(pb.GetVersionRequest(model_id=model(request), version=3))
    version = got.version
    assert (version.version, version.model_fingerprint) == (3, MANIFEST["model"]["fingerprint"])
    assert '"number":2' in version.manifest_json
    for told, proposer in zip(version.proposers, MANIFEST["proposers"], strict=True):
        assert (told.name, told.depth) == (proposer["name"], proposer["depth"])
        for name in ("agreement", "confidence_auc", "confidence_brier", "confidence_precision", "coverage"):
            assert getattr(told, name) == proposer["figures"][name] > 0.0
    by_alias = pb.GetVersionRequest(model_id=model(request), alias="latest")
    assert service.routers.GetVersion(by_alias).version.version == 5


def test_a_page_of_versions_ends_where_its_manifests_are_large(service, registry, request):
    for number in range(5):
        registry.publish(model(request), {"pad": "x" * 900_000, "i": number}, {"x": b"x"}, request_id=f"large {number}")
    sizes, token = [], ""
    while not sizes or token:
        asked = pb.ListVersionsRequest(model_id=model(request), page_token=token)
        page = service.routers.ListVersions(asked)
        sizes.append(len(page.versions))
        token = page.next_page_token
    assert sizes == [3, 2]


def test_aliases(service, publish, request):
    publish(0)
    publish(1)
    name = {"model_id": model(request), "alias": "stable"}
    made = service.routers.SetAlias(
        pb.SetAliasRequest(**name, version=1, expected_version=0, actor="ann", reason="first")
    ).change
    assert not made.HasField("from_version")
    assert (made.alias, made.to_version, made.actor, made.reason) == ("stable", 1, "ann", "first")
    lost = error_of(lambda: service.routers.SetAlias(pb.SetAliasRequest(**name, version=2, expected_version=0)))
    assert isinstance(lost, Conflict)
    assert lost.metadata["current_version"] == "1"
    # Without expected_version it is no compare-and-swap.
    service.routers.SetAlias(pb.SetAliasRequest(**name, version=2))
    back = service.routers.RollbackAlias(pb.RollbackAliasRequest(**name, actor="bob")).change
    assert (back.from_version, back.to_version) == (2, 1)
    history = service.routers.GetAliasHistory(pb.GetAliasHistoryRequest(**name)).changes
    assert [change.to_version for change in history] == [1, 2, 1]
    aliases = service.routers.ListAliases(pb.ListAliasesRequest(model_id=model(request))).aliases
    assert [(alias.name, alias.version) for alias in aliases] == [("latest", 2), ("stable", 1)]


def test_a_request_without_a_model_is_about_the_services_only_one(service, registry):
    for number in range(2):
        registry.publish("tiny", {**MANIFEST, "number": number}, {"x": b"x"}, request_id=f"of the only model {number}")
    routers, name = service.routers, {"alias": "stable"}
    routers.SetAlias(pb.SetAliasRequest(**name, version=1))
    routers.SetCanary(pb.SetCanaryRequest(**name, canary=pb.Canary(version=2, share_per_mille=5)))
    routers.PromoteCanary(pb.PromoteCanaryRequest(**name))
    routers.RollbackAlias(pb.RollbackAliasRequest(**name))
    assert [version.model_id for version in routers.ListVersions(pb.ListVersionsRequest()).versions] == ["tiny"] * 2
    assert routers.GetVersion(pb.GetVersionRequest(**name)).version.model_id == "tiny"
    assert len(routers.GetAliasHistory(pb.GetAliasHistoryRequest(**name)).changes) == 4
    aliases = routers.ListAliases(pb.ListAliasesRequest()).aliases
    assert [alias.name for alias in aliases] == ["latest", "stable"]
    assert next(routers.Watch(pb.WatchRequest(), timeout=60)).event


def test_aliases_and_their_history_come_in_pages(service, publish, request):
    publish(0)
    publish(1)
    name = {"model_id": model(request), "alias": "stable"}
    for version in (1, 2, 1):
        service.routers.SetAlias(pb.SetAliasRequest(**name, version=version, reason=str(version)))
    asked = pb.ListAliasesRequest(model_id=model(request), page_size=1)
    first = service.routers.ListAliases(asked)
    asked.page_token = first.next_page_token
    second = service.routers.ListAliases(asked)
    assert [alias.name for page in (first, second) for alias in page.aliases] == ["latest", "stable"]
    assert not second.next_page_token

    asked = pb.GetAliasHistoryRequest(**name, page_size=2)
    first = service.routers.GetAliasHistory(asked)
    # A change between two pages does not repeat an entry.
    service.routers.SetAlias(pb.SetAliasRequest(**name, version=2))
    asked.page_token = first.next_page_token
    second = service.routers.GetAliasHistory(asked)
    versions = [change.to_version for page in (first, second) for change in page.changes]
    assert (versions, second.next_page_token) == ([1, 2, 1], "")


def test_canary(service, registry, publish, request):
    publish(0)
    publish(1)
    name = {"model_id": model(request), "alias": "stable"}
    service.routers.SetAlias(pb.SetAliasRequest(**name, version=1))
    asked = pb.SetCanaryRequest(
        **name, canary=pb.Canary(version=2, share_per_mille=25), expected_version=1, actor="ann"
    )
    begun = service.routers.SetCanary(asked).change
    assert (begun.from_version, begun.to_version, begun.actor) == (1, 1, "ann")
    assert begun.canary == asked.canary
    aliases = service.routers.ListAliases(pb.ListAliasesRequest(model_id=model(request))).aliases
    assert [(alias.name, alias.HasField("canary")) for alias in aliases] == [("latest", False), ("stable", True)]
    ended = service.routers.SetCanary(pb.SetCanaryRequest(**name)).change
    assert not ended.HasField("canary")
    service.routers.SetCanary(asked)
    promoted = service.routers.PromoteCanary(pb.PromoteCanaryRequest(**name)).change
    assert (promoted.to_version, promoted.HasField("canary")) == (2, False)
    lost = error_of(lambda: service.routers.RollbackAlias(pb.RollbackAliasRequest(**name, expected_version=1)))
    assert isinstance(lost, Conflict)


def test_an_alias_cannot_be_set_to_a_damaged_version(service, registry, publish, request):
    publish(0)
    publish(1, aliases=[])
    digest = registry.get(model(request), 2).manifest["blobs"]["x"]["digest"]
    path: Path = service.folder / "registry/blobs/sha256" / digest[7:9] / digest[7:]
    path.write_bytes(b"?" + path.read_bytes()[1:])
    name = {"model_id": model(request), "alias": "latest"}
    canary = pb.Canary(version=2, share_per_mille=25)
    for call in (
        lambda: service.routers.SetAlias(pb.SetAliasRequest(**name, version=2)),
        lambda: service.routers.SetCanary(pb.SetCanaryRequest(**name, canary=canary)),
    ):
        error = error_of(call)
        assert (type(error), error.reason) == (Corrupt, "VERSION_DAMAGED")
    assert registry.aliases(model(request)) == {"latest": 1}


def test_watch_streams_past_and_new_events(service, publish, request):
    publish(0)
    stream = service.routers.Watch(pb.WatchRequest(model_id=model(request)), timeout=30)
    first, second = next(stream), next(stream)
    assert (first.published.version, first.published.manifest_json) == (1, "")
    assert (second.alias_changed.alias, second.alias_changed.to_version) == ("latest", 1)
    timer = threading.Timer(0.3, lambda: publish(1, aliases=[]))
    timer.start()
    third = next(stream)
    timer.join()
    assert third.published.version == 2
    assert first.event < second.event < third.event
    stream.cancel()
    after = pb.WatchRequest(model_id=model(request), after_event=second.event)
    resumed = service.routers.Watch(after, timeout=30)
    assert next(resumed) == third
    resumed.cancel()


def test_one_flipped_byte_in_a_manifest(service, registry, publish, request):
    publish(0)
    publish(1)
    digest = registry.get(model(request), 1).manifest_digest
    path: Path = service.folder / "registry/manifests/sha256" / digest[7:9] / digest[7:]
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    error = error_of(lambda: service.routers.GetVersion(pb.GetVersionRequest(model_id=model(request), version=1)))
    assert isinstance(error, Corrupt)
    assert error.metadata["expected_digest"] == digest
    assert error.metadata["actual_digest"] not in ("", digest)
    listed = service.routers.ListVersions(pb.ListVersionsRequest(model_id=model(request)))
    assert [(v.version, digest in v.damage) for v in listed.versions] == [(2, False), (1, True)]
    watched = service.routers.Watch(pb.WatchRequest(model_id=model(request)), timeout=60)
    assert digest in next(watched).published.damage
    assert next(watched).alias_changed.to_version == 1
    watched.cancel()
    name = {"model_id": model(request), "alias": "latest"}
    for refused in (
        lambda: service.routers.SetAlias(pb.SetAliasRequest(**name, version=1)),
        lambda: service.routers.RollbackAlias(pb.RollbackAliasRequest(**name)),
    ):
        error = error_of(refused)
        assert (type(error), error.reason) == (Corrupt, "VERSION_DAMAGED")


def test_reflection_and_health_know_both_services(service):
    both = ("neap.calibration.v1.CalibrationService", "neap.router.v1.RouterService")
    for name in ("", *both):
        wait_until(lambda name=name: service.health(name) == health_pb2.HealthCheckResponse.SERVING)
    assert service.channel is not None
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([asked]))
    names = {entry.name for entry in answer.list_services_response.service}
    assert set(both) <= names


def test_stopping_ends_watch_streams(tmp_path):
    service = Service(tmp_path, "--model", "tiny=/nowhere")
    stream = service.routers.Watch(pb.WatchRequest(model_id="tiny"), timeout=60)
    ended: list[grpc.StatusCode] = []

    def read() -> None:
        try:
            list(stream)
        except grpc.RpcError:
            ended.append(stream.code())

    reader = threading.Thread(target=read)
    reader.start()
    # A call after the stream's, so that the stream has surely begun.
    service.routers.ListVersions(pb.ListVersionsRequest(model_id="tiny"))
    assert service.terminate() == 0
    reader.join(60)
    assert ended == [grpc.StatusCode.UNAVAILABLE]
