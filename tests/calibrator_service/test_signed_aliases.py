"""A calibration service that asks for signatures points no alias at a router without one."""

import pytest
from neap_client.router.v1 import router_pb2 as pb

from shared.errors import PreconditionFailed
from shared.exchange.router_files import Signer, read_files
from shared.registry.factory import open_registry
from tests.calibrator_service.conftest import error_of
from tests.router_folders import write_keys, write_router

pytest.importorskip("model_signing", reason="no model-signing: pip install 'neap-server[sign]'")


@pytest.mark.full
def test_an_unsigned_version_gets_no_alias(start_service, tmp_path):
    private, public = write_keys(tmp_path)
    folder = str(write_router(tmp_path / "router"))
    service = start_service("--model", "tiny=/nowhere", "--require-signature", str(public))
    registry = open_registry(str(service.folder / "registry"))
    for signer in (None, Signer(private)):
        read_files(folder, signer=signer).publish(registry, [], "test")

    def point(version: int) -> None:
        service.routers.SetAlias(pb.SetAliasRequest(model_id="tiny", alias="stable", version=version))

    error = error_of(lambda: point(1))
    assert (type(error), error.reason) == (PreconditionFailed, "SIGNATURE_MISSING")
    point(2)
    canary = pb.SetCanaryRequest(alias="stable", canary=pb.Canary(version=1, share_per_mille=100))
    assert error_of(lambda: service.routers.SetCanary(canary)).reason == "SIGNATURE_MISSING"
    assert registry.aliases("tiny") == {"stable": 2}
    job = service.end_of(service.create(aliases=["latest"]))
    assert job.router_version == 3
    assert registry.aliases("tiny") == {"stable": 2}, "what a calibration makes is not signed yet"
