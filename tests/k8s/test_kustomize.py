"""The overlays agree with the services: environment variables, ports and restricted privileges."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config import CalibratorSettings, WorkerSettings

K8S = Path(__file__).resolve().parents[2] / "k8s"
OVERLAYS = ("local", "gpu")
Objects = dict[tuple[str, str], dict[str, Any]]


def build(overlay: str | Path) -> Objects:
    """Build an overlay of k8s/overlays by its name, or the overlay in a folder."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", str(K8S / "overlays" / overlay)]  # an absolute path stays
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    documents = list(yaml.safe_load_all(result.stdout))
    return {(item["kind"], item["metadata"]["name"]): item for item in documents}


def workloads(objects: Objects) -> dict[str, dict[str, Any]]:
    return {
        "worker": objects["Deployment", "neap-worker"]["spec"]["template"]["spec"],
        "calibrator": objects["StatefulSet", "neap-calibrator"]["spec"]["template"]["spec"],
    }


def settings_of(objects: Objects) -> dict[str, str]:
    (settings,) = [item for (kind, _), item in objects.items() if kind == "ConfigMap"]
    return settings["data"]


def test_every_file_is_valid_yaml_and_listed_in_a_kustomization():
    for folder in [K8S / "base", *(K8S / "overlays" / name for name in OVERLAYS)]:
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert files == {name for name in listed if not name.startswith("..")}
        for name in files:
            assert all(yaml.safe_load_all((folder / name).read_text()))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_services_accept_the_settings_of_each_overlay(overlay, monkeypatch):
    objects = build(overlay)
    settings = settings_of(objects)
    known = {"NEAP_WORKER_LISTEN", "NEAP_CALIBRATOR_LISTEN"}
    for kind in (WorkerSettings, CalibratorSettings):
        known |= {f"NEAP_{name.upper()}" for name in kind.model_fields}
    assert set(settings) <= known
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    listens = {"worker": WorkerSettings().listen, "calibrator": CalibratorSettings().listen}
    seconds = WorkerSettings().grace_s + WorkerSettings().drain_timeout_s
    assert len(WorkerSettings().models) == 1
    for name, spec in workloads(objects).items():
        (container,) = spec["containers"]
        assert container["args"] == ["serve", name]
        port = container["ports"][0]["containerPort"]
        assert listens[name] == f"0.0.0.0:{port}"
        assert objects["Service", f"neap-{name}"]["spec"]["ports"][0]["port"] == port
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == port
        assert spec["terminationGracePeriodSeconds"] > seconds


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        ("Deployment", "worker", WorkerSettings),
        ("StatefulSet", "calibrator", CalibratorSettings),
    ],
)
def test_metrics_are_served_on_the_annotated_port(overlay, kind, name, settings, monkeypatch):
    objects = build(overlay)
    template = objects[kind, f"neap-{name}"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    (port,) = [port for port in container["ports"] if port["name"] == "metrics"]
    number = port["containerPort"]
    assert settings().metrics_listen == f"0.0.0.0:{number}"
    assert template["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(number),
        "prometheus.io/path": "/metrics",
    }
    rules = objects["NetworkPolicy", "neap"]["spec"]["ingress"]
    (rule,) = [rule for rule in rules if {"port": number} in rule["ports"]]
    assert rule["ports"] == [{"port": number}]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_run_with_restricted_privileges(overlay):
    objects = build(overlay)
    account = objects["ServiceAccount", "neap"]
    assert account["automountServiceAccountToken"] is False
    for spec in workloads(objects).values():
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        (container,) = spec["containers"]
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
    policy = objects["NetworkPolicy", "neap"]["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}


def test_the_overlays_differ_in_device_and_replicas():
    local, gpu = build("local"), build("gpu")
    assert settings_of(local)["NEAP_DEVICE"] == "cpu"
    assert settings_of(gpu)["NEAP_DEVICE"] == "cuda"
    for name in ("worker", "calibrator"):
        limits = {
            overlay: workloads(objects)[name]["containers"][0]["resources"]["limits"]
            for overlay, objects in (("local", local), ("gpu", gpu))
        }
        assert "nvidia.com/gpu" not in limits["local"]
        assert limits["gpu"]["nvidia.com/gpu"] == "1"
    assert local["Deployment", "neap-worker"]["spec"]["replicas"] == 1
    assert ("PodDisruptionBudget", "neap-worker") not in local
    assert ("PodDisruptionBudget", "neap-worker") in gpu


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_shared_registry_comes_from_the_secret(overlay, tmp_path):
    def inside(path: str) -> str:
        return os.path.relpath(K8S / path, tmp_path)

    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": [inside(f"overlays/{overlay}")],
                "components": [inside("components/shared-registry")],
            }
        )
    )
    objects = build(tmp_path)
    for spec in workloads(objects).values():
        (container,) = spec["containers"]
        # If two sources set the same variable, the later one wins.
        assert [next(iter(source)) for source in container["envFrom"]] == [
            "configMapRef",
            "secretRef",
        ]
        assert container["envFrom"][-1]["secretRef"]["name"] == "neap-registry"
        assert "NEAP_REGISTRY" not in {item["name"] for item in container["env"]}
    egress = objects["NetworkPolicy", "neap"]["spec"]["egress"]
    assert any({"port": 6379} in rule["ports"] for rule in egress)
    job = objects["CronJob", "neap-registry-sweep"]
    assert (
        job["metadata"]["namespace"]
        == objects["Deployment", "neap-worker"]["metadata"]["namespace"]
    )
    spec = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (worker,) = workloads(objects)["worker"]["containers"]
    assert container["image"] == worker["image"]
    assert container["args"] == ["routers", "sweep"]
    assert container["securityContext"] == worker["securityContext"]
    assert container["envFrom"] == worker["envFrom"][1:]
