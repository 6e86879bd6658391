"""docs/metrics.md names what a gateway exports, all of it and nothing else."""

import re
from pathlib import Path

from prometheus_client import generate_latest

from shared.gateway.metrics import GatewayMetrics

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_every_metric_is_documented():
    exported = generate_latest(GatewayMetrics().registry).decode()
    names = set(re.findall(r"^# TYPE (neap_\w+)", exported, re.MULTILINE))
    documented = set(re.findall(r"^\| `(neap_gateway_\w+)", DOCUMENT.read_text(), re.MULTILINE))
    assert names
    assert names == documented
