"""Manifests as kubectl renders them, and what is in them."""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).resolve().parents[1] / "k8s"
OVERLAYS = ("local", "cpu", "gpu")
Objects = dict[tuple[str, str], dict[str, Any]]
# What one may put together, as (name of an overlay or "base", components).
COMPOSITIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((overlay, ()) for overlay in OVERLAYS),
    ("local", ("security", "monitoring", "grpc-route", "trace-export")),
    ("cpu", ("security", "monitoring", "autoscaling", "grpc-route", "trace-export")),
    ("gpu", ("surge", "monitoring", "autoscaling", "security", "grpc-route")),
    ("gpu", ("monitoring", "autoscaling")),
    ("cpu", ("monitoring", "inference-pool")),
    ("base", ("one-pod", "models-from-claim")),
    ("base", ("one-pod", "models-from-s3", "security")),
    ("base", ("gateway", "shared-registry", "models-from-image")),
    ("base", ("shared-registry", "calibration-jobs", "models-from-image", "gpu")),
    ("base", ("gateway", "shared-registry", "models-from-s3", "autoscaling")),
    ("base", ("shared-registry", "calibration-jobs", "models-from-s3", "gpu")),
    ("base", ("gateway", "shared-registry", "security", "calibration-ranks", "models-from-claim", "gpu")),
    ("base", ("shared-registry", "calibration-jobs", "models-from-claim", "gpu", "surge")),
    ("local", ("learning",)),
    ("local", ("learning", "traffic-key", "security")),
    ("cpu", ("learning", "traffic-key", "monitoring")),
    ("gpu", ("several-cards", "security")),
    ("base", ("shared-registry", "calibration-jobs", "models-from-claim", "several-nodes", "gpu")),
)


def name_of(composition: tuple[str, tuple[str, ...]]) -> str:
    return "+".join((composition[0], *composition[1]))


def program(name: str) -> str:
    """A program that the dev extra installs."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"no {name}: install the dev extra"
    return found


@cache
def render_text(base: str, components: tuple[str, ...] = ()) -> str:
    """The rendering of an overlay, or of the base in the namespace neap, with more components."""
    with tempfile.TemporaryDirectory() as folder:

        def inside(path: Path) -> str:
            return os.path.relpath(path, Path(folder).resolve())

        source = K8S / "base" if base == "base" else K8S / "overlays" / base
        composed = {
            "namespace": "neap",
            "resources": [inside(source)],
            "components": [inside(K8S / "components" / name) for name in components],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(composed))
        command = [program("kubectl"), "kustomize", folder]
        # Of a process this short Go need not collect the garbage: a third of its time.
        variables = {**os.environ, "GOGC": "off"}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


def render(base: str, components: Sequence[str] = ()) -> Objects:
    """(kind, name) -> object."""
    return deepcopy(_parsed(base, tuple(components)))


@cache
def _parsed(base: str, components: tuple[str, ...]) -> Objects:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    documents = yaml.load_all(render_text(base, components), loader)
    return {(item["kind"], item["metadata"]["name"]): item for item in documents}


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, pod template) of every workload."""
    for (kind, name), item in objects.items():
        if kind == "CronJob":
            yield name, item["spec"]["jobTemplate"]["spec"]["template"]
        elif kind in ("Deployment", "StatefulSet"):
            yield name, item["spec"]["template"]


def containers(objects: Objects) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name of the container, container, spec of its pod), init containers included."""
    for _, template in pods(objects):
        spec = template["spec"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield container["name"], container, spec


def services(objects: Objects) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """ "worker", "calibrator" and, where there is one, "gateway" -> container and the spec of its pod."""
    return {
        name: (container, spec)
        for name, container, spec in containers(objects)
        if name in ("worker", "calibrator", "gateway")
    }


def environment(objects: Objects, container: dict[str, Any]) -> dict[str, str]:
    """The variables that a container gets from ConfigMaps and its own list. Values from Secrets are left out."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            found |= objects["ConfigMap", source["configMapRef"]["name"]]["data"]
    for variable in container.get("env", ()):
        if "resourceFieldRef" in variable.get("valueFrom", {}):
            assert variable["valueFrom"]["resourceFieldRef"]["containerName"] == container["name"]
            quantity = container["resources"]["requests"]["cpu"]
            # The kubelet rounds up to the divisor.
            milli = quantity.removesuffix("m")
            found[variable["name"]] = str(-(-int(milli) // 1000) if milli != quantity else int(quantity))
        elif "fieldRef" in variable.get("valueFrom", {}):
            found[variable["name"]] = f"<{variable['valueFrom']['fieldRef']['fieldPath']}>"
        else:
            found[variable["name"]] = variable["value"]
    return found
