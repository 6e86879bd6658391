"""Metrics per router version, for comparing a canary with the version in use. Only loaded versions have series, and
version 0, which stands for requests without a router."""

from collections.abc import Collection, Mapping

from prometheus_client.core import CounterMetricFamily

from shared.engine.statistics import EngineStatistics

_VERSION = ["model_id", "router_version"]
_PROPOSER = [*_VERSION, "proposer"]
_COUNTERS = (
    ("requests", _VERSION, "Requests with at least one token, by router version."),
    ("generation_tokens", _VERSION, "Tokens generated, by router version."),
    ("drafted_tokens", _PROPOSER, "Drafts verified, by router version and proposer."),
    ("accepted_tokens", _PROPOSER, "Drafts that were accepted, by router version and proposer."),
    ("exits", _PROPOSER, "Tokens by the proposer of their exit, by router version."),
    ("layer_executions", _VERSION, "Decoder layers run while decoding, by router version."),
    ("layer_executions_saved", _VERSION, "Layer executions less than the full depth."),
    ("layer_executions_extra", _VERSION, "Layer executions beyond the full depth."),
)


def version_families() -> dict[str, CounterMetricFamily]:
    """Empty metric families, by name without the prefix `neap_router_`."""
    families: dict[str, CounterMetricFamily] = {}
    for name, labels, text in _COUNTERS:
        families[name] = CounterMetricFamily(f"neap_router_{name}", text, labels=labels)
    return families


def read_versions(
    model_id: str,
    statistics: EngineStatistics,
    versions: Collection[int],
    families: Mapping[str, CounterMetricFamily],
) -> None:
    """Adds samples for the `versions` that have counts. The engine may change its counts meanwhile."""

    def put(name: str, value: float, *labels: object) -> None:
        families[name].add_metric([model_id, *map(str, labels)], value)

    for version, counts in list(statistics.by_version.items()):
        if version and version not in versions:
            continue
        put("requests", counts.num_requests, version)
        put("generation_tokens", counts.num_generated_tokens, version)
        put("layer_executions", counts.num_layer_executions, version)
        put("layer_executions_saved", counts.num_layer_executions_saved, version)
        put("layer_executions_extra", counts.num_layer_executions_extra, version)
        by_proposer = {"drafted_tokens": counts.drafted, "accepted_tokens": counts.accepted, "exits": counts.exits}
        for name, tokens in by_proposer.items():
            for proposer, count in dict(tokens).items():  # copied at once: the engine may add a proposer
                put(name, count, version, proposer)
