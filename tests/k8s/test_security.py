"""The component that enables TLS and tokens, applied to each overlay."""

import os
from pathlib import Path, PurePosixPath

import pytest
import yaml

from shared.config import CalibratorSettings, WorkerSettings
from tests.k8s.test_kustomize import K8S, OVERLAYS, build, settings_of, workloads

KINDS = {"worker": WorkerSettings, "calibrator": CalibratorSettings}
KEYS = {"tls": {"tls.crt", "tls.key", "ca.crt"}, "tokens": {"tokens"}}


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest, tmp_path: Path):
    def inside(path: str) -> str:
        return os.path.relpath(K8S / path, tmp_path)

    made = {
        "resources": [inside(f"overlays/{request.param}")],
        # With both components applied, neither may undo the other's changes.
        "components": [inside("components/shared-registry"), inside("components/security")],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(made))
    return build(tmp_path)


def test_the_services_read_their_files_from_the_mounted_secrets(objects, monkeypatch):
    for name, value in settings_of(objects).items():
        monkeypatch.setenv(name, value)
    for service, spec in workloads(objects).items():
        (container,) = spec["containers"]
        for variable in container["env"]:
            monkeypatch.setenv(variable["name"], variable["value"])
        settings = KINDS[service]()
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        secrets = {"tls": f"neap-{service}-tls", "tokens": "neap-tokens"}
        for path in (
            *(settings.tls_cert, settings.tls_key, settings.tls_client_ca),
            settings.auth_tokens,
        ):
            mount = mounts[str(PurePosixPath(path).parent)]
            assert mount["readOnly"] is True
            assert "subPath" not in mount
            assert path.name in KEYS[mount["name"]]
            secret = volumes[mount["name"]]["secret"]
            assert secret["secretName"] == secrets[mount["name"]]
            # Only the pod's own group may read them.
            assert secret["defaultMode"] == 0o440
            assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]


def test_probes_use_the_plain_text_port(objects, monkeypatch):
    for service, spec in workloads(objects).items():
        (container,) = spec["containers"]
        for variable in container["env"]:
            monkeypatch.setenv(variable["name"], variable["value"])
        (port,) = [port for port in container["ports"] if port["name"] == "health"]
        number = port["containerPort"]
        assert KINDS[service]().health_listen == f"0.0.0.0:{number}"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == number
        assert "service" in container["readinessProbe"]["grpc"]


def test_only_the_encrypted_port_is_reachable_for_callers(objects):
    for service in KINDS:
        (port,) = objects["Service", f"neap-{service}"]["spec"]["ports"]
        assert port["name"] == "grpc"
        assert "appProtocol" not in port
    rules = objects["NetworkPolicy", "neap"]["spec"]["ingress"]
    assert not any({"port": 8086} in rule["ports"] for rule in rules)


def test_the_manifests_contain_no_secret(objects):
    assert not [name for kind, name in objects if kind == "Secret"]
