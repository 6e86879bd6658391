"""The component that enables TLS and tokens, applied to each overlay."""

from pathlib import PurePosixPath

import pytest

from shared.calibrator_settings import CalibratorSettings
from shared.worker_settings import WorkerSettings
from tests.kustomize import containers, environment, render, services

KINDS = {"worker": WorkerSettings, "calibrator": CalibratorSettings}
KEYS = {"tls": {"tls.crt", "tls.key", "ca.crt"}, "tokens": {"tokens"}}


@pytest.fixture(params=["local", "cpu", "gpu"])
def objects(request: pytest.FixtureRequest):
    return render(request.param, ("security",))


def test_the_services_find_their_files_where_the_secrets_are_mounted(objects, monkeypatch):
    # test_gateway.py has the gateway.
    assert services(objects).keys() - {"gateway"} == KINDS.keys()
    for service in KINDS:
        container, spec = services(objects)[service]
        for name, value in environment(objects, container).items():
            monkeypatch.setenv(name, value)
        settings = KINDS[service]()
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        secrets = {"tls": f"neap-{service}-tls", "tokens": "neap-tokens"}
        for path in (*(settings.tls_cert, settings.tls_key, settings.tls_client_ca), settings.auth_tokens):
            mount = mounts[str(PurePosixPath(path).parent)]
            kind = mount["name"].removeprefix(f"{service}-")
            assert mount["readOnly"] is True
            assert "subPath" not in mount
            assert path.name in KEYS[kind]
            secret = volumes[mount["name"]]["secret"]
            assert secret["secretName"] == secrets[kind]
            # The pod's own group reads them, and nobody else.
            assert secret["defaultMode"] == 0o440
            assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]


def test_a_job_needs_no_certificate(objects):
    for name, container, _ in containers(objects):
        if name == "calibration":
            variables = environment(objects, container)
            assert variables["NEAP_TLS_CERT"] == variables["NEAP_AUTH_TOKENS"] == ""


def test_only_the_encrypted_port_is_reachable_for_callers(objects):
    for service in KINDS:
        (port,) = objects["Service", f"neap-{service}"]["spec"]["ports"]
        assert port["name"] == "grpc"
        assert "appProtocol" not in port
    rules = objects["NetworkPolicy", "neap"]["spec"]["ingress"]
    assert not any({"port": port} in rule["ports"] for rule in rules for port in (8086, 8087))
