"""What the overlays say must be true of the services: variables, ports, and how safely they run."""

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


def build(overlay: str) -> Objects:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", str(K8S / "overlays" / overlay)]
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


def test_every_file_is_yaml_and_listed():
    for folder in [K8S / "base", *(K8S / "overlays" / name for name in OVERLAYS)]:
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert files == {name for name in listed if not name.startswith("..")}
        for name in files:
            assert all(yaml.safe_load_all((folder / name).read_text()))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_settings_are_the_services_own(overlay, monkeypatch):
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
def test_metrics_are_served_where_prometheus_looks(overlay, monkeypatch):
    objects = build(overlay)
    template = objects["Deployment", "neap-worker"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    (port,) = [port for port in container["ports"] if port["name"] == "metrics"]
    number = port["containerPort"]
    assert WorkerSettings().metrics_listen == f"0.0.0.0:{number}"
    assert template["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(number),
        "prometheus.io/path": "/metrics",
    }
    rules = objects["NetworkPolicy", "neap"]["spec"]["ingress"]
    (rule,) = [rule for rule in rules if {"port": number} in rule["ports"]]
    assert rule["ports"] == [{"port": number}]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_run_with_the_least_they_need(overlay):
    objects = build(overlay)
    account = objects["ServiceAccount", "neap"]
    assert account["automountServiceAccountToken"] is False
    for spec in workloads(objects).values():
        assert spec["automountServiceAccountToken"] is False
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


def test_overlays_differ_where_they_should():
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


def test_the_shared_registry_is_the_secrets():
    component = yaml.safe_load((K8S / "components/shared-registry/kustomization.yaml").read_text())
    workload, policy = component["patches"]
    (change,) = yaml.safe_load(workload["patch"])
    source = change["value"]["secretRef"]["name"]
    assert source == "neap-registry"
    for name in ("worker", "calibrator"):
        for document in yaml.safe_load_all((K8S / "base" / f"{name}.yaml").read_text()):
            if document["kind"] in ("Deployment", "StatefulSet"):
                (container,) = document["spec"]["template"]["spec"]["containers"]
                # What comes later wins, so the patch must append to a list that is there.
                assert change["path"] == "/spec/template/spec/containers/0/envFrom/-"
                assert container["envFrom"] == [{"configMapRef": {"name": "neap-settings"}}]
                assert "NEAP_REGISTRY" not in {item["name"] for item in container["env"]}
    (change,) = yaml.safe_load(policy["patch"])
    assert {"port": 6379} in change["value"]["ports"]
