"""Every metric that a worker, a calibrator or a gateway exports, with its labels, from one that has done a little of
everything."""

import json
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from calibrator_service.job import JobState
from calibrator_service.jobs import JobCount
from calibrator_service.metrics import CalibratorMetrics
from inference_service.metrics import WorkerMetrics
from neap_engine.gateway.metrics import GatewayMetrics
from shared.engine.served import Pace
from shared.engine.statistics import EngineStatistics
from shared.model.numerics import Promise

HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


class BoundLadders(SimpleNamespace):
    def __len__(self) -> int:
        return 3


def busy_engine() -> SimpleNamespace:
    """What metrics read of an engine of the model "tiny" that has counted something of each kind."""
    statistics = EngineStatistics(num_layers=4)
    statistics.record_drafts([("prompt-lookup", 1, 1)], 3)
    statistics.exits["prompt-lookup"] += 1
    statistics.by_version[3].exits["prompt-lookup"] += 1
    statistics.served.record("latest", 3, Pace(20, 10, 0.5, 10), num_passes=10, num_drafted=9, num_executions=40)
    return SimpleNamespace(
        loaded=SimpleNamespace(model_id="tiny"),
        promise=Promise({}, is_exact=True),
        known_numerics_id="0123456789abcdef",
        statistics=statistics,
        num_running=1,
        num_waiting=2,
        max_running=16,
        kv_usage_ratio=0.5,
        num_learned_contexts=7,
        ladders=BoundLadders(num_bytes=4_000_000, max_bytes=9_000_000),
    )


def busy_metrics() -> WorkerMetrics:
    """Of one such engine, and one call of each kind."""
    metrics = WorkerMetrics()
    metrics.add_engine(busy_engine(), versions=lambda: {3})
    metrics.time_to_first_token.labels("tiny").observe(0.1)
    metrics.e2e_request_latency.labels("tiny").observe(0.1)
    metrics.request_success.labels("tiny", "eos").inc()
    metrics.requests_rejected.labels("tiny", "QUEUE_FULL").inc()
    metrics.requests_resumed.labels("tiny").inc()
    metrics.request_failures.labels("tiny", "CANCELLED").inc()
    metrics.router_version.labels("tiny").set(3)
    metrics.stale_resolutions.labels("tiny").inc()
    metrics.router_fallbacks.labels("tiny", "canary", "CORRUPT").inc()
    metrics.count_watch_error("tiny", "INTERNAL")
    metrics.learn_answers.labels("tiny", "legal").inc()
    metrics.learn_tokens.labels("tiny", "legal").inc(200)
    metrics.learn_lost.labels("tiny", "legal", "DISK_FULL").inc()
    metrics.served_reports.labels("sent").inc()
    return metrics


def busy_calibrator_metrics() -> CalibratorMetrics:
    metrics = CalibratorMetrics()
    running = SimpleNamespace(model_id="tiny", phase="loading", fraction=0.1)
    store: Any = SimpleNamespace(
        count_jobs=lambda: [JobCount("tiny", JobState.RUNNING, 1, 0)], in_state=lambda _: [running]
    )
    metrics.observe(["tiny"], store, lambda: True, lambda: False)
    metrics.process_deaths.labels("tiny").inc()
    metrics.publications.labels("tiny").inc()
    metrics.failures.labels("tiny", "INTERNAL").inc()
    metrics.duration.labels("tiny", "failed").observe(1.0)
    metrics.judge_acts.set(1)
    metrics.served_reports.labels("taken").inc()
    metrics.verdicts.labels("tiny", "grow").inc()
    metrics.alarms.labels("tiny", "lost_acceptance").inc()
    metrics.learning_new_tokens.labels("tiny", "legal").set(12)
    metrics.learning_jobs.labels("tiny", "succeeded").inc()
    return metrics


def busy_gateway_metrics() -> GatewayMetrics:
    metrics = GatewayMetrics()
    metrics.requests.labels("/v1/models", "200").inc()
    metrics.errors.labels("/v1/models", "INTERNAL").inc()
    metrics.duration.labels("/v1/models").observe(0.1)
    metrics.first_token.labels("/v1/completions").observe(0.1)
    return metrics


def exported() -> dict[str, tuple[str, ...]]:
    """Of a worker: name in queries, without a histogram's suffix -> labels, without `model_id` and `le`."""
    return _exported(busy_metrics().registry)


def exported_by_calibrator() -> dict[str, tuple[str, ...]]:
    """The same."""
    return _exported(busy_calibrator_metrics().registry)


def exported_by_gateway() -> dict[str, tuple[str, ...]]:
    """The same."""
    return _exported(busy_gateway_metrics().registry)


def _exported(registry: CollectorRegistry) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for family in registry.collect():
        for sample in family.samples:
            name = family.name if family.type == "histogram" else sample.name
            found[name] = tuple(sorted(set(sample.labels) - {"model_id", "le"}))
    return found


def scraped(log: Path) -> dict[tuple[str, ...], float]:
    """What a service process exports at the port that its log names last: (name, label values in the labels' order) ->
    value."""
    lines = log.read_text().splitlines()
    ports = [json.loads(line)["port"] for line in lines if '"metrics listening"' in line]
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {(s.name, *dict(sorted(s.labels.items())).values()): s.value for f in families for s in f.samples}
