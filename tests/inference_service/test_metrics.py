import itertools
import sys
import threading

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from inference_service.metrics import WorkerMetrics
from shared.engine.statistics import MAX_VERSIONS, EngineStatistics
from tests.exported_metrics import busy_engine, busy_metrics, exported


def _parsed(metrics):
    text = generate_latest(metrics.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_export_parses_and_declares_its_types():
    families = _parsed(busy_metrics())
    for name in exported():
        assert families[name.removesuffix("_total")].documentation
    for family in busy_metrics().registry.collect():
        assert family.samples, family.name
    types = {name: family.type for name, family in families.items()}
    assert types["neap_num_requests_running"] == "gauge"
    assert types["neap_exits"] == "counter"
    assert types["neap_engine_step_duration_seconds"] == "histogram"
    assert types["neap_time_to_first_token_seconds"] == "histogram"
    assert {"process_cpu_seconds", "python_gc_collections", "python_info"} <= set(types)
    assert not any(name.endswith("_created") for name in families)


def test_engines_are_read_when_asked_and_told_apart():
    metrics, other = busy_metrics(), busy_engine()
    other.loaded.model_id = "b"
    metrics.add_engine(other)
    other.statistics.num_generated_tokens, other.num_running = 7, 5
    read = metrics.registry.get_sample_value
    for name, values in {"tiny": (0, 1), "b": (7, 5)}.items():
        assert read("neap_generation_tokens_total", {"model_id": name}) == values[0]
        assert read("neap_num_requests_running", {"model_id": name}) == values[1]


def test_versions_that_left_leave_no_series():
    metrics, engine = WorkerMetrics(), busy_engine()
    served = {3, 4}
    metrics.add_engine(engine, versions=lambda: served)
    for version in (3, 4, 5):
        engine.statistics.record_drafts([("prompt-lookup", 1, 0)], version)
        engine.statistics.by_version[version].num_requests = version

    def versions(name):
        samples = _parsed(metrics)[name].samples
        return {sample.labels["router_version"]: sample.value for sample in samples}

    assert versions("neap_router_requests") == {"3": 3.0, "4": 4.0}
    served.remove(3)
    assert versions("neap_router_requests") == {"4": 4.0}
    served.add(5)
    assert versions("neap_router_requests") == {"4": 4.0, "5": 5.0}


def test_versions_are_counted_for_no_longer_than_there_is_room():
    statistics = EngineStatistics(4)
    for version in range(1, MAX_VERSIONS + 3):
        statistics.record_drafts([("prompt-lookup", 1, 0)], version)
        statistics.record_drafts([("prompt-lookup", 1, 0)], 1)
    assert len(statistics.by_version) == MAX_VERSIONS
    assert 1 in statistics.by_version
    assert {2, 3}.isdisjoint(statistics.by_version)


def test_buckets_are_cumulative_and_agree_with_their_count():
    metrics, engine = WorkerMetrics(), busy_engine()
    metrics.add_engine(engine)
    for value in (0.003, 0.003, 0.03, 99.0):
        engine.statistics.step_s.record(value)
    samples = _parsed(metrics)["neap_engine_step_duration_seconds"].samples
    buckets = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
    assert (buckets["0.0025"], buckets["0.005"], buckets["0.04"]) == (0, 2, 3)
    assert (buckets["5.0"], buckets["+Inf"]) == (3, 4)
    (count,) = [s.value for s in samples if s.name.endswith("_count")]
    (total,) = [s.value for s in samples if s.name.endswith("_sum")]
    assert count == 4
    assert total == pytest.approx(99.036)


def test_scrapes_read_while_the_engine_adds_proposers():
    """The engine's thread changes the dictionaries that a scrape reads, without a lock."""
    metrics, engine = WorkerMetrics(), busy_engine()
    metrics.add_engine(engine)
    stop = threading.Event()

    def count():
        for number in itertools.count():
            if stop.is_set():
                break
            if number % 500 == 0:
                engine.statistics.exits.clear()
            engine.statistics.exits[f"proposer-{number % 500}"] += 1

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    writer = threading.Thread(target=count)
    writer.start()
    try:
        for _ in range(50):
            assert list(metrics.registry.collect())
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        writer.join()
