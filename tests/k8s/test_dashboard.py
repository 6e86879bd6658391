"""The dashboard and docs/metrics.md name what a worker exports, all of it and nothing else."""

import json
import re
from pathlib import Path

from tests.exported_metrics import HISTOGRAM_SUFFIXES, exported, exported_series
from tests.promql import grouped_labels, metrics_in

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "k8s" / "components" / "monitoring" / "neap-worker.json"
DOCUMENT = ROOT / "docs" / "metrics.md"
# Exported, but deliberately not on the dashboard.
NOT_SHOWN: set[str] = set()


def _queries():
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            (selector,) = re.findall(r"label_values\((.*), \w+\)", variable["query"]["query"])
            yield selector


def test_every_query_uses_exported_metrics_only():
    series = exported_series()
    for query in _queries():
        names = metrics_in(query)
        assert names, query
        assert names <= series, query


def test_every_query_uses_exported_labels_only():
    labels = exported()
    for query in _queries():
        asked = grouped_labels(query)
        known = {"le", "model_id", "instance"}
        for name in metrics_in(query):
            base = re.sub(f"({'|'.join(HISTOGRAM_SUFFIXES)})$", "", name)
            known |= set(labels.get(name, labels.get(base, ())))
        assert asked <= known, query


def test_every_metric_is_on_the_dashboard_or_listed_as_not_shown():
    shown = {name for query in _queries() for name in metrics_in(query)}
    shown |= {name.removesuffix(suffix) for name in shown for suffix in HISTOGRAM_SUFFIXES}
    ours = {name for name in exported() if name.startswith("neap_")}
    assert ours - shown == NOT_SHOWN


def test_every_panel_uses_the_data_source_variable():
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    for panel in dashboard["panels"]:
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_the_document_explains_every_metric_and_its_labels():
    text = DOCUMENT.read_text().partition("## A calibration service")[0]
    rows = re.findall(r"^\| `(neap_\w+)(?:\{([^}]*)\})?` \| (.+?) \|", text, re.M)
    explained = {name: tuple(sorted(filter(None, labels.split(",")))) for name, labels, _ in rows}
    ours = {name: labels for name, labels in exported().items() if name.startswith("neap_")}
    assert explained == ours
    assert len(rows) == len(explained)
