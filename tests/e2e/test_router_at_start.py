"""`--router` and `--require-signature` of a worker, as a real process."""

import json

import pytest
from neap_client import NeapClient
from neap_client.inference.v1.inference_pb2 import RouterSelector

from inference_service.servicer import SERVICE_NAME
from shared.errors import PreconditionFailed
from shared.exchange.router_files import Signer, read_files
from shared.ladder.artefact import pack_ladder
from shared.ladder.folder import write_router_folder
from shared.model.load import load_model
from shared.registry.factory import open_registry
from tests.generation import EXACT, request_of
from tests.reasons import raises
from tests.router_folders import write_keys, write_router
from tests.worker import build_ladder
from tests.worker_process import worker_process

pytestmark = [pytest.mark.e2e, pytest.mark.full]


def test_a_worker_starts_with_a_router_and_serves_signed_ones_alone(folder, tmp_path):
    pytest.importorskip("model_signing", reason="no model-signing: pip install 'neap-server[sign]'")
    private, public = write_keys(tmp_path)
    plain, signed = tmp_path / "plain", tmp_path / "signed"
    loaded = load_model(folder, model_id="elsewhere")
    write_router_folder(plain, *pack_ladder(build_ladder(loaded), {}))
    files = read_files(str(plain), signer=Signer(private))
    write_router_folder(signed, files.manifest, files.blobs)
    registry = open_registry(str(tmp_path / "registry"))
    flags = ["--require-signature", str(public), "--router", str(signed)]
    with (
        worker_process(folder, tmp_path / "registry", *flags, is_forked=True) as (_, address),
        NeapClient(address, num_attempts=1) as client,
    ):
        client.wait_ready(SERVICE_NAME, timeout_s=60)
        started = next(client.generate(request_of(4, depth=EXACT))).started
        assert started.router_version == 1
        read_files(str(plain), "tiny").publish(registry, ["unsigned"], "test")
        request = request_of(4, depth=EXACT, router=RouterSelector(alias="unsigned"))
        with raises(PreconditionFailed, "SIGNATURE_MISSING"):
            list(client.generate(request))


@pytest.mark.parametrize(("flag", "reason"), [("--router", "ROUTER_MISMATCH"), ("--require-signature", "BAD_KEY")])
def test_a_router_of_other_weights_or_a_wrong_key_ends_the_start(folder, tmp_path, flag, reason):
    if reason == "BAD_KEY":
        pytest.importorskip("model_signing", reason="no model-signing: pip install 'neap-server[sign]'")
    with (tmp_path / "log").open("wb") as log:
        value = str(write_router(tmp_path / "router"))
        try:
            with worker_process(folder, tmp_path / "registry", flag, value, stderr=log, is_forked=True) as (process, _):
                assert process.wait(60) == 2
        except AssertionError:  # it ended before it listened
            pass
    (line,) = [one for one in map(json.loads, (tmp_path / "log").read_text().splitlines()) if "reason" in one]
    assert line["reason"] == reason
