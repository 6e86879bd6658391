"""Every metric a worker exports, with its labels, from one that has done a little of everything."""

import json
import urllib.request
from pathlib import Path
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from inference_service.engine.memory.prefixes import Prefixes
from inference_service.engine.quality.shadow import Shadow, ShadowCounts
from inference_service.engine.statistics import EngineStatistics
from inference_service.metrics import WorkerMetrics
from shared.ladder.rungs import Draft

HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


def busy_engine() -> SimpleNamespace:
    """What metrics read of an engine of the model "tiny" that has counted something of each kind."""
    statistics = EngineStatistics(num_layers=4)
    statistics.record_drafts([Draft(1, 0.5, "suffix", 0)], 1, 3)
    statistics.exits["suffix"] += 1
    statistics.by_version[3].exits["suffix"] += 1
    shadow = Shadow(None, Prefixes(0))
    shadow.counts[3, 0.05] = ShadowCounts(num_checked=20, num_differing=1)
    return SimpleNamespace(
        loaded=SimpleNamespace(model_id="tiny"),
        statistics=statistics,
        shadow=shadow,
        num_running=1,
        num_waiting=2,
        kv_usage_ratio=0.5,
    )


def busy_metrics() -> WorkerMetrics:
    """Of one such engine, and one call of each kind."""
    metrics = WorkerMetrics()
    metrics.add_engine(busy_engine(), versions=lambda: {3})
    metrics.time_to_first_token.labels("tiny").observe(0.1)
    metrics.e2e_request_latency.labels("tiny").observe(0.1)
    metrics.request_success.labels("tiny", "eos").inc()
    metrics.requests_rejected.labels("tiny", "QUEUE_FULL").inc()
    metrics.request_failures.labels("tiny", "CANCELLED").inc()
    metrics.router_version.labels("tiny").set(3)
    metrics.stale_resolutions.labels("tiny").inc()
    metrics.router_fallbacks.labels("tiny", "canary", "CORRUPT").inc()
    return metrics


def exported() -> dict[str, tuple[str, ...]]:
    """Name in queries, without a histogram's suffix -> labels, without `model_id` and `le`."""
    found: dict[str, tuple[str, ...]] = {}
    for family in busy_metrics().registry.collect():
        for sample in family.samples:
            name = family.name if family.type == "histogram" else sample.name
            found[name] = tuple(sorted(set(sample.labels) - {"model_id", "le"}))
    return found


def exported_series() -> set[str]:
    """Names of all series, histograms' suffixes included."""
    return {
        sample.name for family in busy_metrics().registry.collect() for sample in family.samples
    }


def scraped(log: Path) -> dict[tuple[str, ...], float]:
    """What a service process exports at the port that its log names last: (name, label values in the labels' order) -> value."""
    lines = log.read_text().splitlines()
    ports = [json.loads(line)["port"] for line in lines if '"metrics listening"' in line]
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        (s.name, *dict(sorted(s.labels.items())).values()): s.value
        for f in families
        for s in f.samples
    }
