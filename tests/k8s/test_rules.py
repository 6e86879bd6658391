"""The alerts and the scaler's queries: expressions that Prometheus takes, over metrics that are exported, as the
documents say."""

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client import CollectorRegistry

from calibrator_service.jobs import JobCount
from calibrator_service.metrics import CalibratorMetrics
from inference_service.metrics import WorkerMetrics
from neap_engine.gateway.app import Gateway
from neap_engine.gateway.metrics import GatewayMetrics
from shared.gateway_settings import GatewaySettings
from shared.rpc.security import SecurityCollector
from tests.exported_metrics import (
    HISTOGRAM_SUFFIXES,
    busy_calibrator_metrics,
    busy_engine,
    busy_gateway_metrics,
    busy_metrics,
)
from tests.kustomize import K8S, render
from tests.promql import counters_in, grouped_labels, matched_labels, metrics_in

ROOT = K8S.parent
# Prometheus adds these to every series of a pod.
TARGET_LABELS = {"namespace", "pod", "instance"}
# Rows of the documents whose advice is no alert: comparisons of two router versions during a rollout (docs/rollout.md),
# and what only somebody who knows the callers can judge.
NOT_ALERTS = {
    "neap_router_layer_executions_saved_total",
    "neap_router_memory_bytes",
    "neap_unauthorized_calls_total",
}


# Their events go on while they last, so the series has been there for a while when they count.
ON_GOING = {
    "NeapRequestsRejected",
    "NeapDraftsRejected",
    "NeapRouterNotLoaded",
    "NeapRouterWatchFails",
    "NeapLearnsNothing",
    "NeapReportsFail",
    "NeapReportsRefused",
    "NeapGatewayWithoutWorkers",
    "NeapGatewayFull",
    "NeapGatewayFails",
}


def security_families():
    files = SimpleNamespace(num_reloads=1, num_refused=1)
    security = SimpleNamespace(
        certificate=SimpleNamespace(files=files, expiry_time_s=0.0),
        access=SimpleNamespace(files=files, refusals={"TOKEN_MISSING": 1}),
    )
    registry = CollectorRegistry()
    registry.register(SecurityCollector(security))
    return registry.collect()


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Series -> labels, of both services and the gateway."""
    found: dict[str, set[str]] = {}
    registries = (busy_metrics().registry, busy_calibrator_metrics().registry, busy_gateway_metrics().registry)
    families = [family for registry in registries for family in registry.collect()]
    for family in [*families, *security_families()]:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def alerts():
    rule = render("cpu", ("monitoring",))["PrometheusRule", "neap"]
    return [alert for group in rule["spec"]["groups"] for alert in group["rules"]]


def scaling_queries():
    scaler = render("cpu", ("autoscaling",))["ScaledObject", "neap-worker"]
    return [trigger["metadata"]["query"] for trigger in scaler["spec"]["triggers"]]


def test_every_expression_is_over_what_is_exported(exported):
    for query in [*(alert["expr"] for alert in alerts()), *scaling_queries()]:
        names = metrics_in(query)
        assert names, query
        assert names <= exported.keys(), query
        known = TARGET_LABELS.union(*(exported[name] for name in names))
        assert grouped_labels(query) <= known, query
        assert matched_labels(query) <= known, query


async def test_counters_whose_first_event_is_an_alert_are_there_at_0_from_the_start():
    """increase() does not see the birth of a series at 1, and nothing compares with what is not there."""
    worker, calibrator, gateway = WorkerMetrics(), CalibratorMetrics(), GatewayMetrics()
    worker.add_engine(busy_engine(), versions=lambda: {3})
    store = SimpleNamespace(count_jobs=lambda: [JobCount("tiny", "queued", 1, 0)], in_state=lambda _: [])
    calibrator.observe(["tiny"], store, lambda: True, lambda: False)
    Gateway(GatewaySettings(workers="127.0.0.1:1"), None, gateway).app()
    found = [family for one in (worker, calibrator, gateway) for family in one.registry.collect()]
    samples = [sample for family in [*found, *security_families()] for sample in family.samples]
    for alert in alerts():
        for name, labels in counters_in(alert["expr"]) if alert["alert"] not in ON_GOING else ():
            for label, values in labels.items() or [("", "")]:
                for value in values.split("|"):
                    assert any(s.name == name and s.labels.get(label, "") == value for s in samples), (
                        f"{alert['alert']}: {name} {label} {value}"
                    )


def test_every_alert_says_what_happens_and_how_bad_it_is():
    names = [alert["alert"] for alert in alerts()]
    assert len(names) == len(set(names))
    for alert in alerts():
        assert alert["labels"]["severity"] in ("warning", "critical")
        shown = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
        by = grouped_labels(alert["expr"])
        assert shown <= (by or {"model_id"}), alert["alert"]


def test_what_the_documents_advise_to_alert_on_has_an_alert():
    advised = set()
    for name in ("metrics.md", "security.md"):
        rows = re.findall(
            r"^\| `(neap_\w+)(?:\{[^}]*\})?` \|.*\| ([^|]*) \|$", (ROOT / "docs" / name).read_text(), re.M
        )
        advised |= {metric for metric, advice in rows if advice.strip()}
    watched = {
        re.sub(f"({'|'.join(HISTOGRAM_SUFFIXES)})$", "", metric)
        for alert in alerts()
        for metric in metrics_in(alert["expr"])
    }
    assert advised - watched == NOT_ALERTS
    assert len(advised) > 20


def test_the_scaler_watches_the_namespace_of_its_workers_and_waits_for_requests_and_memory():
    objects = render("cpu", ("autoscaling",))
    scaler = objects["ScaledObject", "neap-worker"]
    assert ("Deployment", scaler["spec"]["scaleTargetRef"]["name"]) in objects
    assert {name for query in scaling_queries() for name in metrics_in(query)} == {
        "neap_num_requests_waiting",
        "neap_kv_cache_usage_ratio",
    }
    for query in scaling_queries():
        assert f'namespace="{scaler["metadata"]["namespace"]}"' in query


def test_the_dashboards_of_the_cluster_are_the_files():
    dashboards = render("cpu", ("monitoring",))["ConfigMap", "neap-dashboards"]
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = (K8S / "components" / "monitoring").glob("*.json")
    assert dashboards["data"] == {path.name: path.read_text() for path in files}


@pytest.mark.full
def test_alerts_fire_when_they_should_and_not_before(tmp_path):
    """By Prometheus' own tool, over series of numbers. The tests above run without it."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: it is in Debian's package prometheus and in no package of PyPI")
    rule = render("cpu", ("monitoring",))["PrometheusRule", "neap"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    cases = (Path(__file__).parent / "alert_cases.yaml").read_text()
    (tmp_path / "cases.yaml").write_text(cases)
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "cases.yaml"]):
        result = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
