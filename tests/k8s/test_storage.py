"""No claim that one node may hold is mounted by two workloads, models are read-only, and everything else is the pod's
own."""

import re

import pytest

from tests.kustomize import COMPOSITIONS, Objects, containers, name_of, pods, render

each_composition = pytest.mark.parametrize("composition", COMPOSITIONS, ids=name_of)
SCRATCH = {"/tmp", "/data", "/dev/shm"}


def shared_claims(objects: Objects) -> dict[str, set[str]]:
    """Name of a claim -> the workloads that mount it, for claims that a workload may write to."""
    mounted: dict[str, set[str]] = {}
    for workload, template in pods(objects):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        spec = template["spec"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            for mount in container["volumeMounts"]:
                claim = volumes.get(mount["name"], {}).get("persistentVolumeClaim")
                if claim and not (claim.get("readOnly") and mount.get("readOnly")):
                    mounted.setdefault(claim["claimName"], set()).add(workload)
    return {claim: workloads for claim, workloads in mounted.items() if len(workloads) > 1}


@each_composition
def test_no_claim_is_shared(composition):
    objects = render(*composition)
    assert shared_claims(objects) == {}
    for (kind, name), item in objects.items():
        assert kind != "PersistentVolumeClaim", "claims are made from templates, one for each pod"
        for template in item["spec"].get("volumeClaimTemplates", ()) if "spec" in item else ():
            assert name == "neap-calibrator"
            assert template["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_a_claim_of_two_workloads_is_noticed():
    objects = render("cpu")
    for _, template in pods(objects):
        template["spec"]["volumes"].append({"name": "shared", "persistentVolumeClaim": {"claimName": "neap-data"}})
        template["spec"]["containers"][0]["volumeMounts"].append({"name": "shared", "mountPath": "/shared"})
    assert set(shared_claims(objects)) == {"neap-data"}


@each_composition
def test_every_mount_has_its_volume_and_models_are_read_only(composition):
    objects = render(*composition)
    claims = {
        template["metadata"]["name"]
        for (kind, _), item in objects.items()
        if kind == "StatefulSet"
        for template in item["spec"].get("volumeClaimTemplates", ())
    }
    for name, container, spec in containers(objects):
        volumes = {volume["name"] for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            assert mount["name"] in volumes | claims, (name, mount)
            writes = mount["mountPath"] in SCRATCH or name == "fetch-model"
            assert mount.get("readOnly", False) != writes, (name, mount)


@each_composition
def test_workers_keep_nothing_that_another_node_lacks(composition):
    """A Deployment's pods may start anywhere: they have folders of their own, Secrets, and models that all may read."""
    objects = render(*composition)
    for (kind, _), item in objects.items():
        if kind != "Deployment":
            continue
        for volume in item["spec"]["template"]["spec"]["volumes"]:
            claim = volume.get("persistentVolumeClaim")
            assert {"emptyDir", "image", "secret"} & volume.keys() or claim["readOnly"], volume


@each_composition
def test_there_is_a_registry_and_who_fetches_may_do_so(composition):
    objects = render(*composition)
    ports = {
        port["port"]
        for (kind, _), item in objects.items()
        if kind == "NetworkPolicy"
        for rule in item["spec"].get("egress", ())
        for port in rule.get("ports", ())
    }
    for name, container, spec in containers(objects):
        sources = container.get("envFrom", ())
        secrets = {source["secretRef"]["name"] for source in sources if "secretRef" in source}
        if "neap-registry" in secrets:
            assert 6379 in ports
        elif name in ("worker", "calibrator"):
            # A folder, on the one claim of the one pod.
            assert {one["name"] for one in spec["containers"]} == {"worker", "calibrator"}
            (settings,) = [
                item["data"]
                for (kind, settings_name), item in objects.items()
                if kind == "ConfigMap" and settings_name.startswith("neap-settings")
            ]
            assert settings["NEAP_REGISTRY"].startswith("/data/")
        if name == "fetch-model":
            assert 443 in ports
            folder = objects_data(objects, "neap-model")["MODEL_FOLDER"]
            model = objects_data(objects, "neap-settings")["NEAP_MODELS"]
            assert model.partition("=")[2] == folder


def objects_data(objects: Objects, start: str) -> dict[str, str]:
    (data,) = [
        item["data"]
        for (kind, name), item in objects.items()
        if kind == "ConfigMap" and re.fullmatch(rf"{start}-\w+", name)
    ]
    return data
