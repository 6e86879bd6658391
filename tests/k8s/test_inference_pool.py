"""The InferencePool's workers and what its picker reads of them, and the runtime of KServe."""

import kubernetes_validate
import pytest
import yaml

from shared.config import settings_from_command_line
from shared.service_settings import ModelSource
from shared.worker_settings import WorkerSettings
from tests.exported_metrics import exported
from tests.k8s.test_settings import ports_of
from tests.kustomize import K8S, render, services

KSERVE = K8S.parent / "docs" / "examples" / "kserve" / "serving-runtime.yaml"


def test_the_pool_is_the_workers_and_their_dialect():
    objects = render("cpu", ("inference-pool",))
    pool = objects["InferencePool", "neap-worker"]["spec"]
    worker = objects["Deployment", "neap-worker"]["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()
    container, _ = services(objects)["worker"]
    assert [port["number"] for port in pool["targetPorts"]] == [ports_of(container)["grpc"]]


def test_the_picker_reads_metrics_that_a_worker_exports():
    objects = render("cpu", ("inference-pool",))
    config = yaml.safe_load(objects["ConfigMap", "neap-picker"]["data"]["config.yaml"])
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    assert engine.pop("name") == plugins["core-metrics-extractor"]["defaultEngine"]
    # One series for each model, of which the dialect has one.
    assert {name: exported()[name] for name in engine.values()} == dict.fromkeys(engine.values(), ())
    used = [*config["schedulingProfiles"][0]["plugins"], *config["requestHandler"]["parsers"]]
    used += [part for source in config["dataLayer"]["sources"] for part in (source, *source["extractors"])]
    assert {part["pluginRef"] for part in used} == set(plugins)
    container, _ = services(objects)["worker"]
    (metrics,) = objects["NetworkPolicy", "neap-inference-pool"]["spec"]["ingress"][1]["ports"]
    assert metrics["port"] == ports_of(container)["metrics"]


@pytest.mark.parametrize("version", ["1.33", "1.37"])
def test_the_runtime_of_kserve_starts_a_worker(version):
    runtime, service = yaml.safe_load_all(KSERVE.read_text())
    (container,) = runtime["spec"]["containers"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [container]}}
    kubernetes_validate.validate(pod, version, strict=True)
    assert container["args"][:2] == ["serve", "worker"]
    flags = [flag.replace("{{.Name}}", service["metadata"]["name"]) for flag in container["args"][2:]]
    settings = settings_from_command_line(WorkerSettings, "worker", flags)
    assert settings.models == (ModelSource("smollm2", "/mnt/models"),)
    assert settings.vllm_dialect
    assert settings.listen.endswith(f":{ports_of(container)['h2c']}")
    assert settings.health_listen.endswith(f":{container['readinessProbe']['grpc']['port']}")
    named = {form["name"] for form in runtime["spec"]["supportedModelFormats"]}
    assert service["spec"]["predictor"]["model"]["modelFormat"]["name"] in named
