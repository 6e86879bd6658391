"""The dashboards and docs/metrics.md name what a worker, a calibrator and a gateway export, all of it and nothing
else."""

import json
import re
from fnmatch import fnmatch
from inspect import getsource
from pathlib import Path

import pytest

from inference_service.metrics import ClientWaitsCollector
from shared.rpc.security import SecurityCollector
from tests.exported_metrics import HISTOGRAM_SUFFIXES, exported, exported_by_calibrator, exported_by_gateway
from tests.promql import grouped_labels, metrics_in

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = {
    "neap-worker.json": exported,
    "neap-calibrator.json": exported_by_calibrator,
    "neap-gateway.json": exported_by_gateway,
}
DOCUMENT = ROOT / "docs" / "metrics.md"
each_dashboard = pytest.mark.parametrize(("name", "exporter"), DASHBOARDS.items(), ids=DASHBOARDS)


def _read(name):
    return json.loads((ROOT / "k8s" / "components" / "monitoring" / name).read_text())


def _queries(name):
    dashboard = _read(name)
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            (selector,) = re.findall(r"label_values\((.*), \w+\)", variable["query"]["query"])
            yield selector


def _base(name, families):
    """The name of a family: that of a series without a histogram's suffix."""
    base = re.sub(f"({'|'.join(HISTOGRAM_SUFFIXES)})$", "", name)
    return base if base in families else name


@each_dashboard
def test_every_query_uses_exported_metrics_and_labels_only(name, exporter):
    families = exporter()
    for query in _queries(name):
        asked = {_base(metric, families) for metric in metrics_in(query)}
        assert asked, query
        assert asked <= families.keys(), query
        known = {"le", "model_id", "instance"}.union(*(families[metric] for metric in asked))
        assert grouped_labels(query) <= known, query


@each_dashboard
def test_every_metric_is_on_its_dashboard(name, exporter):
    families = exporter()
    shown = {_base(metric, families) for query in _queries(name) for metric in metrics_in(query)}
    assert {metric for metric in families if metric.startswith("neap_")} <= shown


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_uses_the_data_source_variable(name):
    dashboard = _read(name)
    assert dashboard["uid"] == name.removesuffix(".json")
    variables = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    for panel in dashboard["panels"]:
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            used = set(re.findall(r'"\$(\w+)', json.dumps(part.get("expr", "")).replace("\\", "")))
            assert used <= variables.keys(), part
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("exporter", DASHBOARDS.values(), ids=DASHBOARDS)
def test_the_document_explains_every_metric_and_its_labels(exporter):
    ours = {name: labels for name, labels in exporter().items() if name.startswith("neap_")}
    text = DOCUMENT.read_text()
    rows = re.findall(r"^\| `(neap_\w+)(?:\{([^}]*)\})?` \| (.+?) \|", text, re.M)
    explained = {name: tuple(label for label in sorted(filter(None, labels.split(",")))) for name, labels, _ in rows}
    assert len(rows) == len(explained)
    # `model_id` is left out where all metrics of a service have it.
    assert ours == {name: tuple(label for label in explained[name] if label != "model_id") for name in ours}
    theirs = {name for other in DASHBOARDS.values() for name in other()}
    assert explained.keys() <= theirs


def test_every_metric_stands_beside_vllms_name_or_none():
    section = DOCUMENT.read_text().partition("## vLLM's names")[2].partition("\n## ")[0]
    told = re.findall(r"`(neap_[\w*]+)`", section)
    sources = map(getsource, (ClientWaitsCollector, SecurityCollector))
    names = {name for source in sources for name in re.findall(r'"(neap_\w+)"', source)}
    names |= {name for other in DASHBOARDS.values() for name in other() if name.startswith("neap_")}
    matches = {
        name: [pattern for pattern in told if fnmatch(name, pattern) or pattern == f"{name}_total"] for name in names
    }
    assert {name: found for name, found in matches.items() if len(found) != 1} == {}
    assert {pattern for found in matches.values() for pattern in found} == set(told)
