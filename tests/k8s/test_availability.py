"""Nodes can be drained, rollouts leave somebody who serves, and names are found, whatever is put together."""

import pytest

from tests.kustomize import COMPOSITIONS, Objects, name_of, render

each_composition = pytest.mark.parametrize("composition", COMPOSITIONS, ids=name_of)


def fewest_replicas(objects: Objects, name: str) -> int:
    scaler = objects.get(("ScaledObject", name))
    if scaler is not None:
        return int(scaler["spec"]["minReplicaCount"])
    return int(objects["Deployment", name]["spec"]["replicas"])


@each_composition
def test_a_node_can_be_drained_however_few_pods_there_are(composition):
    objects = render(*composition)
    for (kind, name), item in objects.items():
        if kind == "PodDisruptionBudget":
            assert item["spec"]["maxUnavailable"] >= 1
            assert item["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
            assert item["spec"]["selector"] == objects["Deployment", name]["spec"]["selector"]


@each_composition
def test_a_rollout_always_leaves_somebody_who_serves(composition):
    objects = render(*composition)
    for (kind, name), item in objects.items():
        if kind == "Deployment":
            rolling = item["spec"]["strategy"]["rollingUpdate"]
            assert fewest_replicas(objects, name) > rolling["maxUnavailable"]


def test_metrics_that_cannot_be_read_end_no_worker():
    """A fallback of KEDA sets a number of replicas, also a lower one than that of now."""
    assert "fallback" not in render("cpu", ("autoscaling",))["ScaledObject", "neap-worker"]["spec"]


def test_dns_is_asked_at_any_address():
    """NodeLocal DNSCache answers from the node's own network, which no selector of pods matches."""
    egress = render("cpu")["NetworkPolicy", "neap"]["spec"]["egress"]
    (rule,) = [rule for rule in egress if {"port": 53, "protocol": "UDP"} in rule["ports"]]
    assert "to" not in rule


def test_in_one_pod_each_service_is_found_while_the_other_loads():
    """Such a pod is ready only if both services are."""
    objects = render("local")
    for name in ("neap-worker", "neap-calibrator"):
        assert objects["Service", name]["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in render("cpu")["Service", "neap-worker"]["spec"]
