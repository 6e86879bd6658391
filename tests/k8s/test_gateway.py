"""The component gateway: what it is given, how it reaches the workers, and who reaches it."""

import pytest

from neap_engine.gateway.app import Gateway
from neap_engine.gateway.clients import open_client
from neap_engine.gateway.metrics import GatewayMetrics
from shared.config import settings_from_command_line
from shared.gateway_settings import GatewaySettings
from tests.k8s.test_settings import PROBES, ports_of
from tests.kustomize import COMPOSITIONS, OVERLAYS, environment, name_of, render, services

WITH_GATEWAY = [one for one in COMPOSITIONS if one[0] in OVERLAYS or "gateway" in one[1]]
each_composition = pytest.mark.parametrize("composition", WITH_GATEWAY, ids=name_of)


@pytest.fixture
def gateway_in(monkeypatch):
    """(settings, container, spec of the pod) of the gateway in a rendering."""

    def read(objects):
        container, spec = services(objects)["gateway"]
        for variable, value in environment(objects, container).items():
            monkeypatch.setenv(variable, value)
        settings = settings_from_command_line(GatewaySettings, "gateway", container["args"][2:])
        return settings, container, spec

    return read


@each_composition
def test_probes_ask_paths_of_the_gateway_with_its_scheme(composition, gateway_in):
    settings, container, _ = gateway_in(render(*composition))
    paths = {}
    for probe in PROBES:
        get = container[probe]["httpGet"]
        assert ports_of(container)[get["port"]] == 8080
        assert get.get("scheme", "HTTP") == ("HTTPS" if settings.tls_cert else "HTTP")
        paths[probe] = get["path"]
    # A kubelet shows no certificate.
    assert settings.tls_client_ca is None
    assert paths["readinessProbe"] == "/readyz"
    assert {paths["startupProbe"], paths["livenessProbe"]} == {"/healthz"}


async def test_the_probed_paths_exist(gateway_in):
    settings, *_ = gateway_in(render("cpu"))
    workers = open_client(settings)  # raises if tokens would be sent in plain text
    routes = Gateway(settings, workers, GatewayMetrics()).app().routes
    await workers.close()
    assert {"/healthz", "/readyz"} <= {route.path for route in routes}


@each_composition
def test_it_calls_the_workers_as_they_expect_it(composition, gateway_in):
    objects = render(*composition)
    settings, container, spec = gateway_in(objects)
    name, _, port = settings.workers.removeprefix("dns:///").partition(":")
    assert [one["port"] for one in objects["Service", name]["spec"]["ports"]] == [int(port)]
    worker, _ = services(objects)["worker"]
    is_secured = "NEAP_TLS_CERT" in environment(objects, worker)
    assert settings.drop_tokens != is_secured
    secrets = {volume["name"]: volume["secret"] for volume in spec["volumes"] if "secret" in volume}
    if not is_secured:
        assert secrets == {}
        return
    files = (settings.tls_cert, settings.tls_key, settings.worker_ca)
    assert [str(path) for path in files] == [f"/etc/neap/tls/{name}" for name in ("tls.crt", "tls.key", "ca.crt")]
    assert (settings.worker_cert, settings.worker_key) == (settings.tls_cert, settings.tls_key)
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == "/etc/neap/tls"]
    assert mount["readOnly"] is True
    assert "subPath" not in mount
    assert secrets[mount["name"]] == {"secretName": "neap-gateway-tls", "defaultMode": 0o440}


@each_composition
def test_it_knows_no_registry_and_no_tokens(composition):
    container, spec = services(render(*composition))["gateway"]
    assert not [source for source in container["envFrom"] if "secretRef" in source]
    assert "neap-tokens" not in str(spec)


def test_policies_let_callers_in_and_the_gateway_to_the_workers():
    objects = render("cpu")
    container, _ = services(objects)["gateway"]
    template = objects["Deployment", "neap-gateway"]["spec"]["template"]
    own = objects["NetworkPolicy", "neap-gateway"]["spec"]
    assert own["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    base = objects["NetworkPolicy", "neap"]["spec"]
    # The same callers as those of the services, and the same Prometheus.
    assert [rule["from"] for rule in own["ingress"]] == [rule["from"] for rule in base["ingress"]]
    ports = [[one["port"] for one in rule["ports"]] for rule in own["ingress"]]
    assert ports == [[ports_of(container)["http"]], [ports_of(container)["metrics"]]]
    theirs = objects["NetworkPolicy", "neap-worker-from-gateway"]["spec"]
    ((out,), (into,)) = own["egress"], theirs["ingress"]
    assert out["to"] == [{"podSelector": theirs["podSelector"]}]
    assert into["from"] == [{"podSelector": own["podSelector"]}]
    assert out["ports"] == into["ports"] == [{"port": 7071}]


def test_a_rollout_leaves_a_gateway():
    objects = render("cpu")
    spec = objects["Deployment", "neap-gateway"]["spec"]
    assert spec["replicas"] > 1
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
