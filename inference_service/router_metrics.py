"""Metrics per router version, for comparing a canary with the version in use. Only loaded versions have series, and
version 0, which stands for requests without a router."""

from collections.abc import Collection, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.engine.quality.shadow import Shadow
from shared.engine.statistics import EngineStatistics

NO_BOUND = "none"
_VERSION = ["model_id", "router_version"]
_RUNG = [*_VERSION, "rung"]
_STRATUM = [*_VERSION, "bound"]
_COUNTERS = (
    ("requests", _VERSION, "Requests with at least one token, by router version."),
    ("generation_tokens", _VERSION, "Tokens generated, by router version."),
    ("drafted_tokens", _RUNG, "Drafts verified or final at once, by router version and rung."),
    ("accepted_tokens", _RUNG, "Drafts that were accepted, by router version and rung."),
    ("exits", _RUNG, "Tokens by the rung of their exit, by router version."),
    ("layer_executions", _VERSION, "Decoder layers run while decoding, by router version."),
    ("layer_executions_saved", _VERSION, "Layer executions less than the full depth."),
    ("layer_executions_extra", _VERSION, "Layer executions beyond the full depth."),
    ("shadow_checks", _STRATUM, "Relaxed answers compared with the full model's, by bound."),
    ("shadow_disagreements", _STRATUM, "Of these, the ones that differ in some token."),
    ("shadow_dropped", _STRATUM, "Relaxed answers sampled but not checked."),
    ("relaxed_served_exact", _VERSION, "Requests for relaxed that were served as exact."),
)
_GAUGES = (
    ("shadow_disagreement_ratio", _STRATUM, "Share of the checked answers that differ."),
    ("shadow_disagreement_lower_limit", _STRATUM, "Lower confidence limit of that share."),
    ("relaxed_suspended", _VERSION, "1: relaxed is served as exact: it exceeded its bound."),
)


def version_families() -> dict[str, Metric]:
    """Empty metric families, by name without the prefix `neap_router_`."""
    families: dict[str, Metric] = {}
    for name, labels, text in _COUNTERS:
        families[name] = CounterMetricFamily(f"neap_router_{name}", text, labels=labels)
    for name, labels, text in _GAUGES:
        families[name] = GaugeMetricFamily(f"neap_router_{name}", text, labels=labels)
    return families


def read_versions(
    model_id: str,
    statistics: EngineStatistics,
    shadow: Shadow,
    versions: Collection[int],
    families: Mapping[str, Metric],
) -> None:
    """Adds samples for the `versions` that have counts. The engine may change its counts meanwhile."""

    def put(name: str, value: float, *labels: object) -> None:
        family = families[name]
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
        family.add_metric([model_id, *map(str, labels)], value)

    for version, counts in list(statistics.by_version.items()):
        if version and version not in versions:
            continue
        put("requests", counts.num_requests, version)
        put("generation_tokens", counts.num_generated_tokens, version)
        put("layer_executions", counts.num_layer_executions, version)
        put("layer_executions_saved", counts.num_layer_executions_saved, version)
        put("layer_executions_extra", counts.num_layer_executions_extra, version)
        put("relaxed_suspended", shadow.is_suspended(version), version)
        put("relaxed_served_exact", shadow.num_served_exact.get(version, 0), version)
        by_rung = {"drafted_tokens": counts.drafted, "accepted_tokens": counts.accepted, "exits": counts.exits}
        for name, tokens in by_rung.items():
            for rung, count in dict(tokens).items():  # copied at once: the engine may add a rung
                put(name, count, version, rung)
    for (version, bound), checks in list(shadow.counts.items()):
        if version not in versions:
            continue
        labels = (version, NO_BOUND if bound is None else f"{bound:g}")
        put("shadow_checks", checks.num_checked, *labels)
        put("shadow_disagreements", checks.num_differing, *labels)
        put("shadow_dropped", checks.num_dropped, *labels)
        put("shadow_disagreement_lower_limit", checks.lower_limit, *labels)
        ratio = checks.num_differing / max(checks.num_checked, 1)
        put("shadow_disagreement_ratio", ratio, *labels)
