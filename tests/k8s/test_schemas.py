"""Every composition renders, and the schemas of Kubernetes and of the custom resources accept it."""

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.kustomize import COMPOSITIONS, K8S, name_of, render

VERSIONS = ("1.33", "1.37")
CUSTOM = {
    "PodMonitor": "prometheus_operator.v1",
    "PrometheusRule": "prometheus_operator.v1",
    "ScaledObject": "keda.v1alpha1",
}
# The part of the Gateway API's GRPCRoute that is used here.
_REFERENCE = {"type": "object", "required": ["name"], "additionalProperties": False}
GRPC_ROUTE = {
    "type": "object",
    "required": ["parentRefs", "rules"],
    "additionalProperties": False,
    "properties": {
        "parentRefs": {
            "type": "array",
            "items": _REFERENCE
            | {
                "properties": {
                    "name": {"type": "string"},
                    "namespace": {"type": "string"},
                    "sectionName": {"type": "string"},
                }
            },
        },
        "hostnames": {"type": "array", "items": {"type": "string"}},
        "rules": {
            "type": "array",
            "maxItems": 16,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "matches": {
                        "type": "array",
                        "maxItems": 64,
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "method": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "properties": {
                                        "type": {"enum": ["Exact", "RegularExpression"]},
                                        "service": {"pattern": r"^[A-Za-z_][A-Za-z_0-9.]*$"},
                                        "method": {"pattern": "^[A-Za-z_][A-Za-z_0-9]*$"},
                                    },
                                }
                            },
                        },
                    },
                    "backendRefs": {
                        "type": "array",
                        "items": _REFERENCE | {"properties": {"name": {"type": "string"}, "port": {"type": "integer"}}},
                    },
                },
            },
        },
    },
}

# The published schema of an InferencePool (inference.networking.k8s.io/v1), where unknown fields are errors, too.
_PORT = {
    "type": "object",
    "required": ["number"],
    "additionalProperties": False,
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
}
INFERENCE_POOL = {
    "type": "object",
    "required": ["selector", "targetPorts"],
    "additionalProperties": False,
    "properties": {
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "targetPorts": {"type": "array", "items": _PORT, "minItems": 1, "maxItems": 8},
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "additionalProperties": False,
            "properties": {"matchLabels": {"type": "object", "minProperties": 1, "maxProperties": 64}},
        },
        "endpointPickerRef": {
            "type": "object",
            # The port is required where the picker is a Service, which it is unless `kind` says otherwise.
            "required": ["name", "port"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 253},
                "port": _PORT,
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}
# The part of a LeaderWorkerSet (leaderworkerset.x-k8s.io/v1) that is used here. Its templates are those of pods.
LEADER_WORKER_SET = {
    "type": "object",
    "required": ["leaderWorkerTemplate"],
    "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "leaderWorkerTemplate": {
            "type": "object",
            "required": ["workerTemplate"],
            "additionalProperties": False,
            "properties": {
                "size": {"type": "integer", "minimum": 1},
                "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "None"]},
                "leaderTemplate": {"type": "object"},
                "workerTemplate": {"type": "object"},
            },
        },
    },
}
PARTS = {"GRPCRoute": GRPC_ROUTE, "InferencePool": INFERENCE_POOL, "LeaderWorkerSet": LEADER_WORKER_SET}


def check(document: dict[str, Any]) -> None:
    """Raises an error if a schema does not accept the object. Fields that no schema knows are errors, too."""
    kind = document["kind"]
    if kind in PARTS:
        jsonschema.validate(document["spec"], PARTS[kind])
        for role in ("leaderTemplate", "workerTemplate") if kind == "LeaderWorkerSet" else ():
            check({"apiVersion": "v1", "kind": "Pod", **document["spec"]["leaderWorkerTemplate"][role]})
    elif kind in CUSTOM:
        # Imported where it is needed: it takes seconds. `extra` makes unknown fields errors. The metadata is
        # Kubernetes' own.
        module = import_module(f"cloudcoil.models.{CUSTOM[kind]}")
        getattr(module, kind).model_validate_json(json.dumps(document), extra="forbid")
    else:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=name_of)
def test_schemas_accept_what_is_rendered(composition):
    for document in render(*composition).values():
        check_once(json.dumps(document, sort_keys=True))


@cache
def check_once(document: str) -> None:
    """Compositions have most of their objects in common."""
    check(json.loads(document))


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("Deployment", lambda spec: spec.update(replica=2)),
        ("PodMonitor", lambda spec: spec["podMetricsEndpoints"][0].update(prt="metrics")),
        ("PrometheusRule", lambda spec: spec["groups"][0]["rules"][0].update(expression="1")),
        ("ScaledObject", lambda spec: spec["scaleTargetRef"].pop("name")),
        ("ScaledObject", lambda spec: spec.update(maxReplicas=2)),
        ("InferencePool", lambda spec: spec.update(appProtocol="h2c")),
        ("InferencePool", lambda spec: spec["endpointPickerRef"].pop("port")),
        ("GRPCRoute", lambda spec: spec["rules"][0].update(timeouts={"request": "1s"})),
        ("LeaderWorkerSet", lambda spec: spec["leaderWorkerTemplate"].update(sise=2)),
        ("LeaderWorkerSet", lambda spec: spec["leaderWorkerTemplate"]["workerTemplate"]["spec"].update(container=[])),
    ],
)
def test_schemas_refuse_what_is_wrong(kind, damage):
    components = ("monitoring", "autoscaling", "grpc-route", "inference-pool")
    documents = (render("base", ("several-nodes",)) | render("cpu", components)).values()
    document = next(document for document in documents if document["kind"] == kind)
    check(document)
    damage(document["spec"])
    with pytest.raises(Exception, match=r"\w"):
        check(document)


def test_every_file_and_every_component_is_used():
    """A file that no kustomization lists, and a component that no composition above renders, would never be checked."""
    rendered = {name for _, components in COMPOSITIONS for name in components}
    for kustomization in K8S.rglob("kustomization.yaml"):
        folder, text = kustomization.parent, yaml.safe_load(kustomization.read_text())
        for name in text.get("components", ()):
            rendered.add((folder / name).resolve().relative_to(K8S / "components").as_posix())
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert files == {name for name in text.get("resources", ()) if name.endswith(".yaml")}
    existing = {
        path.parent.relative_to(K8S / "components").as_posix()
        for path in Path(K8S / "components").rglob("kustomization.yaml")
    }
    assert rendered == existing
