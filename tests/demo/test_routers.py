import pytest
from neap_client.calibration.v1 import calibration_pb2 as pb

from demo.routers import Catalogue, parent_digest
from neap_engine.cli.connection import connect
from shared.errors import NeapError
from tests.manifests import real_manifest

FINGERPRINT = real_manifest()["model"]["fingerprint"]
TEXT = pb.SelfGenerated(prompts=["a", "b"])


@pytest.fixture
def catalogue(service):
    with connect(service.address) as client:
        yield Catalogue(client, "tiny", FINGERPRINT)


def test_a_published_router_of_this_model_is_used_again(catalogue):
    found = catalogue.published("demo")
    assert found.version == 2


def test_a_router_of_another_revision_of_the_model_is_not(service):
    with connect(service.address) as client:
        assert Catalogue(client, "tiny", "sha256:other").published("demo") is None


def test_a_calibration_asks_for_text_budget_and_aliases(service, catalogue):
    service.calibration.states[-1]["router_version"] = 1
    assert catalogue.calibrated(TEXT, 30, ("demo", "latest")).version == 1
    spec = service.calibration.spec
    assert list(spec.self_generated.prompts) == ["a", "b"]
    assert (spec.time_budget.seconds, list(spec.aliases)) == (30, ["demo", "latest"])


@pytest.mark.parametrize("aliases", [["demo"], ["other"]])
def test_only_an_unfinished_job_of_the_same_story_is_continued(service, catalogue, aliases):
    spec = pb.CalibrationSpec(aliases=aliases)
    service.calibration.states[0]["spec"] = spec
    service.calibration.states[-1]["router_version"] = 1
    catalogue.calibrated(TEXT, 30, ("demo", "latest"))
    assert (service.calibration.spec is None) == (aliases == ["demo"])


def test_a_failed_job_says_why(service, catalogue):
    failure = pb.Failure(reason="BUDGET_TOO_SHORT", message="give it 60 seconds")
    service.calibration.states[-1] = {"state": pb.STATE_FAILED, "failure": failure}
    with pytest.raises(NeapError, match="give it 60 seconds") as caught:
        catalogue.calibrated(TEXT, 30, ("demo",))
    assert caught.value.reason == "BUDGET_TOO_SHORT"


def test_a_cancelled_job_ends_the_demo(service, catalogue):
    service.calibration.states[-1] = {"state": pb.STATE_CANCELLED}
    with pytest.raises(KeyboardInterrupt):
        catalogue.calibrated(TEXT, 30, ("demo",))


def test_a_calibration_goes_on_from_its_parent(service, catalogue):
    service.calibration.states[-1]["router_version"] = 1
    catalogue.calibrated(TEXT, 30, ("demo-one-kind",), parent=catalogue.published("demo"))
    assert service.calibration.spec.parent.version == 2
    catalogue.calibrated(TEXT, 30, ("demo",))
    assert not service.calibration.spec.HasField("parent")


@pytest.mark.parametrize(("parent", "digest"), [({"manifest_digest": "sha256:1"}, "sha256:1"), (None, "")])
def test_a_router_knows_its_parent(service, catalogue, parent, digest):
    manifest = real_manifest()
    manifest["calibration"]["spec"]["parent"] = parent
    service.routers.manifest = manifest
    assert parent_digest(catalogue.published("demo")) == digest
