"""Both services with every secret there is, in trouble of every kind, at their most talkative: none of it may be
said."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from neap_client.calibration.v1 import calibration_pb2, calibration_pb2_grpc
from neap_client.inference.v1 import inference_pb2, inference_pb2_grpc
from neap_client.router.v1 import router_pb2, router_pb2_grpc

from tests.certificates import issued, write
from tests.registry_servers import shared_url
from tests.servers import S3_ENVIRONMENT
from tests.tokens import bearer, write_tokens
from tests.waiting import wait_until
from tests.worker import save_model

pytestmark = [pytest.mark.e2e, pytest.mark.full]
ROOT = Path(__file__).resolve().parents[2]
SERVING = health_pb2.HealthCheckResponse.SERVING
PASSWORD = "hunter2-%2F"
SERVICES = {"inference_service": "worker", "calibrator_service": "calibrator"}
PROMPT = "the patient of room nine"


def _start(module, folder, environment):
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    with (folder / f"{SERVICES[module]}.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, "--listen", "127.0.0.1:0", "--grace-s", "0"],
            env={**os.environ, **environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def _address(process):
    line = process.stdout.readline()
    assert line.startswith("listening on "), line
    return line.split()[-1]


def _said(folder):
    """All that was logged, by jobs' processes too."""
    return "\n".join(path.read_text(errors="replace") for path in folder.rglob("*.log"))


def _attempt(call, **options):
    """Whatever comes of it; how it ended."""
    try:
        result = call(timeout=60, **options)
        if hasattr(result, "__next__"):
            list(result)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _provoke(channels, tokens):
    """Calls that succeed, are refused, are not understood, and run into whatever is broken."""
    garbage = channels["worker"].unary_unary("/neap.inference.v1.InferenceService/GetModel")
    generate = inference_pb2_grpc.InferenceServiceStub(channels["worker"]).Generate
    routers = router_pb2_grpc.RouterServiceStub(channels["calibrator"])
    calibrations = calibration_pb2_grpc.CalibrationServiceStub(channels["calibrator"])
    spec = calibration_pb2.CalibrationSpec(
        model_id="tiny", max_tokens=50, self_generated=calibration_pb2.SelfGenerated()
    )
    move = router_pb2.SetAliasRequest(model_id="tiny", alias="stable", version=7)
    full = inference_pb2.DepthPolicy(full=inference_pb2.Full())
    for token in (*tokens.values(), "neap_wr0ng-token", tokens["all"][:-1]):
        metadata = bearer(token)
        for depth in (full, inference_pb2.DepthPolicy()):
            request = inference_pb2.GenerateRequest(
                model_id="tiny", text=PROMPT, depth=depth, stopping=inference_pb2.Stopping(max_tokens=2)
            )
            _attempt(generate, request=request, metadata=metadata)
        _attempt(garbage, request=b"\xff" + token.encode(), metadata=metadata)
        _attempt(routers.SetAlias, request=move, metadata=metadata)
        _attempt(
            calibrations.CreateCalibration,
            request=calibration_pb2.CreateCalibrationRequest(request_id="one", spec=spec),
            metadata=metadata,
        )


@pytest.fixture
def redis_with_password(own_redis):
    with own_redis.client() as client:
        client.acl_setuser("neap", enabled=True, passwords=["+hunter2-/"], keys=["neap:*"], categories=["+@all"])
    return own_redis


def test_no_secret_is_logged_or_shown_in_a_process_list(redis_with_password, s3, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    model = save_model(tmp_path / "model")
    files = write(tmp_path / "tls", issued(trustme.CA(), "127.0.0.1"))
    trust = files.authority.read_bytes()
    tokens = write_tokens(tmp_path / "tokens")
    url = shared_url(redis_with_password, s3).replace("redis://", f"redis://neap:{PASSWORD}@")
    environment = {
        **S3_ENVIRONMENT,
        "NEAP_REGISTRY": url,
        "NEAP_MODELS": f"tiny={model}",
        "NEAP_DATA_DIR": str(logs / "data"),
        "NEAP_LOG_LEVEL": "debug",
        "NEAP_TLS_CERT": str(files.certificate),
        "NEAP_TLS_KEY": str(files.key),
        "NEAP_AUTH_TOKENS": str(tmp_path / "tokens"),
    }
    secret = S3_ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]
    key_lines = files.key.read_text().splitlines()[1:-1]
    running = {module: _start(module, logs, environment) for module in SERVICES}
    # These cannot start, and say why.
    failing = [
        _start("calibrator_service", logs, {**environment, **wrong})
        for wrong in (
            {"NEAP_REGISTRY": url.replace(PASSWORD, "wr0ng-password")},
            {"AWS_SECRET_ACCESS_KEY": "wr0ng-secret"},
            {"NEAP_REGISTRY": f"redis://neap:{PASSWORD}@127.0.0.1:1/0?objects=nonsense"},
            {"NEAP_REGISTRY": f"gopher://neap:{PASSWORD}@127.0.0.1:1/0"},
            {"NEAP_TLS_CERT": str(files.key)},
            {"NEAP_AUTH_TOKENS": str(files.key)},
        )
    ]
    try:
        addresses = {SERVICES[module]: _address(process) for module, process in running.items()}
        channels = {
            name: grpc.secure_channel(address, grpc.ssl_channel_credentials(trust))
            for name, address in addresses.items()
        }
        check = health_pb2_grpc.HealthStub(channels["worker"]).Check
        wait_until(lambda: check(health_pb2.HealthCheckRequest()).status == SERVING)
        _provoke(channels, tokens)
        shown = [
            word
            for process in running.values()
            for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children(True))
            for word in one.cmdline()
        ]
        assert len(shown) > 10
        assert not any("hunter2" in word for word in shown)
        redis_with_password.kill()
        files.key.write_text("".join(key_lines))
        (tmp_path / "tokens").write_text(f"ann admin {tokens['all']}\n")
        _provoke(channels, tokens)
        # A new connection, at which the broken key is seen.
        with grpc.secure_channel(addresses["worker"], grpc.ssl_channel_credentials(trust)) as late:
            grpc.channel_ready_future(late).result(60)
        for channel in channels.values():
            channel.close()
        for process in running.values():
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        for process in failing:
            assert process.wait(60) == 2
    finally:
        for process in (*running.values(), *failing):
            process.kill()
            process.wait()
            process.stdout.close()
    said = _said(logs)
    # The trouble was there, and was told.
    for event in ("REDIS_UNAVAILABLE", "TOKEN_UNKNOWN", "not reloaded", "BAD_CERTIFICATE"):
        assert event in said, event
    secrets = [*tokens.values(), "hunter2", secret, "wr0ng", PROMPT, *key_lines]
    for text in secrets:
        assert text not in said, text
