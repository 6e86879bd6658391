"""The worker's Prometheus metrics. Names follow vLLM's if they mean the same. docs/metrics.md explains each."""

from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client import GCCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.engine.engine import Engine
from shared.engine.request.request import FinishReason
from shared.engine.statistics import Distribution, EngineStatistics
from shared.rpc.calls import ClientWaits
from shared.service_metrics import ServiceMetrics

FIRST_TOKEN_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)
REQUEST_BOUNDS_S = (0.1, 0.25, 0.5, 1, 1.5, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)


class WorkerMetrics(ServiceMetrics):
    """One registry with the metrics of calls, engines and this process.

    Labels have few values: models that this worker serves ("" for any other), proposers (at most one per layer and four
    more), router versions that are loaded, and reasons that are constants in the source.
    """

    def __init__(self) -> None:
        super().__init__()
        GCCollector(registry=self.registry)
        self._engines = _EngineCollector()
        self.registry.register(self._engines)
        self.time_to_first_token = self.histogram(
            "neap_time_to_first_token_seconds",
            "From a Generate call's arrival until its first token is handed to gRPC.",
            ["model_id"],
            buckets=FIRST_TOKEN_BOUNDS_S,
        )
        self.e2e_request_latency = self.histogram(
            "neap_e2e_request_latency_seconds",
            "From a Generate call's arrival until all of its answer is handed to gRPC; calls that succeeded.",
            ["model_id"],
            buckets=REQUEST_BOUNDS_S,
        )
        self.request_success = self.counter(
            "neap_request_success",
            "Generate calls that got a whole answer, by the reason why it ended.",
            ["model_id", "finished_reason"],
        )
        self.requests_rejected = self.counter(
            "neap_requests_rejected",
            "Generate calls refused before the engine accepted them, by the reason in their ErrorInfo.",
            ["model_id", "reason"],
        )
        self.requests_resumed = self.counter(
            "neap_requests_resumed",
            "Generate calls that went on with an answer that another call had begun.",
            ["model_id"],
        )
        self.request_failures = self.counter(
            "neap_request_failures",
            "Generate calls that ended early: cancelled, past their deadline, or failed, by reason.",
            ["model_id", "reason"],
        )
        self.router_version = self.gauge(
            "neap_router_version", "Router version of the latest request that named none.", ["model_id"]
        )
        self.stale_resolutions = self.counter(
            "neap_stale_router_resolutions",
            "Requests served by their alias' last known version because the registry did not answer.",
            ["model_id"],
        )
        self.router_fallbacks = self.counter(
            "neap_router_fallbacks",
            "Requests served by their alias' previous version, or not by its canary, because the wanted version was "
            "not ready, requests that named no router and for which none is published, and those served by the model's "
            "alias because the registry did not say whether their pool has one, by kind (alias, canary, default or "
            "pool) and reason.",
            ["model_id", "wanted", "reason"],
        )
        self.router_watch_errors = self.counter(
            "neap_router_watch_errors",
            "Failed attempts to learn of published routers and moved aliases, by reason; INTERNAL is a fault of the "
            "worker.",
            ["model_id", "reason"],
        )
        self.learn_answers = self.counter(
            "neap_learn_answers", "Served answers that were kept to learn from (--learn).", ["model_id", "pool"]
        )
        self.learn_tokens = self.counter(
            "neap_learn_tokens", "Tokens of these, of prompts and answers.", ["model_id", "pool"]
        )
        self.learn_lost = self.counter(
            "neap_learn_lost_answers",
            "Served answers that were to be kept and are not, by reason; no client has lost anything.",
            ["model_id", "pool", "reason"],
        )
        self.served_reports = self.counter(
            "neap_served_reports",
            "Reports of what was served to the calibrator that judges versions: sent, or the reason why it was not.",
            ["outcome"],
        )

    def count_watch_error(self, model_id: str, reason: str) -> None:
        self.router_watch_errors.labels(model_id, reason).inc()

    def add_engine(self, engine: Engine, *, versions: Callable[[], Collection[int]] = tuple) -> None:
        """Reports `engine` from now on, under its model's id. `versions` returns the router versions to report.
        Any thread may call it."""
        self._begin(engine.loaded.model_id)
        self._engines.engines.append((engine, versions))

    def _begin(self, model_id: str) -> None:
        """The series that alerts ask about are there at 0 from the start: one that is born at 1 has not increased."""
        for finished in FinishReason:
            self.request_success.labels(model_id, finished.value)
        for reason in ("INTERNAL", "HANDED_OVER", "DEADLINE_EXCEEDED"):
            self.request_failures.labels(model_id, reason)
        self.requests_resumed.labels(model_id)
        self.stale_resolutions.labels(model_id)


class ClientWaitsCollector(Collector):
    """Calls that are open and whose request message has not arrived, read from the server's counters at each scrape."""

    def __init__(self, waits: ClientWaits) -> None:
        self._waits = waits

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "neap_calls_awaiting_request",
            "Calls of all methods that are open and whose request message has not arrived.",
            value=self._waits.num_awaited,
        )
        unsent = CounterMetricFamily(
            "neap_calls_without_request",
            "Calls of all methods that ended before their request message had arrived, by reason.",
            labels=["reason"],
        )
        for reason, count in dict(self._waits.unsent).items():
            unsent.add_metric([reason], count)
        yield unsent


class _EngineCollector(Collector):
    """Reads the engines' counters at each scrape, so that counting needs no lock in their threads."""

    def __init__(self) -> None:
        self.engines: list[tuple[Engine, Callable[[], Collection[int]]]] = []

    def collect(self) -> Iterator[Metric]:
        families, of_versions = _families(), _version_families()
        for engine, versions in list(self.engines):
            _read(engine, families)
            _read_versions(engine.loaded.model_id, engine.statistics, versions(), of_versions)
        yield from families.values()
        yield from of_versions.values()


def _families() -> dict[str, Metric]:
    def gauge(name: str, text: str) -> None:
        families[name] = GaugeMetricFamily(f"neap_{name}", text, labels=["model_id"])

    def counter(name: str, text: str, *labels: str) -> None:
        families[name] = CounterMetricFamily(f"neap_{name}", text, labels=["model_id", *labels])

    def histogram(name: str, text: str) -> None:
        families[name] = HistogramMetricFamily(f"neap_{name}", text, labels=["model_id"])

    families: dict[str, Metric] = {}
    gauge("num_requests_running", "Requests that run in the engine, paused ones included.")
    gauge("num_requests_waiting", "Requests that wait for the engine.")
    gauge("max_requests_running", "Most requests that share a step.")
    gauge(
        "kv_cache_usage_ratio",
        "Share of the KV budget reserved for running requests: their prompts and longest possible answers.",
    )
    gauge("routers_bound", "Routers that are ready in memory.")
    gauge("router_memory_bytes", "Memory that these take; what several have in common counts once.")
    gauge("router_memory_max_bytes", "Memory that they may take.")
    gauge("learned_contexts", "Contexts in the table that learns from answers.")
    gauge("exact_is_full", "1 if exact gives the tokens of full, 0 if near ties may differ.")
    families["numerics_info"] = GaugeMetricFamily(
        "neap_numerics_info",
        "1, for the id of the bits that a model gives here: workers with one id give the same answers.",
        labels=["model_id", "numerics_id"],
    )
    counter("requests_put_back", "Running requests of low priority that were put back into the queue.")
    counter("prompt_tokens", "Tokens of the prompts whose prefill is complete.")
    counter(
        "prompt_tokens_cached",
        "Of these, the ones whose keys and values were copied from a request with the same prefix.",
    )
    counter("generation_tokens", "Tokens generated, end tokens and those of failed calls included.")
    counter("drafted_tokens", "Drafts that were verified, by proposer.", "proposer")
    counter("accepted_tokens", "Drafts that were accepted, by proposer.", "proposer")
    counter("exits", 'Tokens delivered by the proposer they left at; "full": the full model.', "proposer")
    counter(
        "layer_executions",
        "Decoder layers run while decoding, per request: a shared pass counts for each. Not the prompts'.",
    )
    counter(
        "layer_executions_saved",
        "Layer executions that steps needed less than the full depth for each of their tokens.",
    )
    counter(
        "layer_executions_extra",
        "Layer executions that steps needed more than that, because the full model rejected drafts.",
    )
    text = (
        "whole answers of exact without their first step, by how many requests ran: 0 for 1, 1 for 2, 2 for 3 and 4, .."
    )
    counter("exact_tokens", f"Tokens of {text}", "load")
    counter("exact_seconds", f"Seconds of the steps of {text}", "load")
    histogram("request_queue_time_seconds", "From submission to the engine's first step for it.")
    histogram(
        "inter_token_latency_seconds",
        "Time since a request's previous step with tokens, divided by this step's tokens and counted once for each of "
        "them. Without the first token. Includes time in which the client did not read.",
    )
    histogram("engine_step_duration_seconds", "One step of all requests that are not paused.")
    histogram("engine_step_batch_size", "Requests that shared a step.")
    return families


def _read(engine: Engine, families: Mapping[str, Metric]) -> None:
    model_id, statistics = engine.loaded.model_id, engine.statistics

    def put(name: str, value: float, *labels: str) -> None:
        family = families[name]
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
        family.add_metric([model_id, *labels], value)

    def put_by_proposer(name: str, counts: Mapping[str, int]) -> None:
        for proposer, count in dict(counts).items():  # copied at once: the engine may add a proposer
            put(name, count, proposer)

    put("num_requests_running", engine.num_running)
    put("num_requests_waiting", engine.num_waiting)
    put("max_requests_running", engine.max_running)
    put("kv_cache_usage_ratio", engine.kv_usage_ratio)
    put("routers_bound", len(engine.ladders))
    put("router_memory_bytes", engine.ladders.num_bytes)
    put("router_memory_max_bytes", engine.ladders.max_bytes)
    put("learned_contexts", engine.num_learned_contexts)
    put("exact_is_full", engine.promise.is_exact)
    if numerics_id := engine.known_numerics_id:
        put("numerics_info", 1, numerics_id)
    put("requests_put_back", statistics.num_put_back)
    put("prompt_tokens", statistics.num_prompt_tokens)
    put("prompt_tokens_cached", statistics.num_cached_prompt_tokens)
    put("generation_tokens", statistics.num_generated_tokens)
    put_by_proposer("drafted_tokens", statistics.drafted)
    put_by_proposer("accepted_tokens", statistics.accepted)
    put_by_proposer("exits", statistics.exits)
    put("layer_executions", statistics.num_layer_executions)
    put("layer_executions_saved", statistics.num_layer_executions_saved)
    put("layer_executions_extra", statistics.num_layer_executions_extra)
    for load, served in sorted(dict(statistics.served.by_load).items()):
        put("exact_tokens", served.num_tokens, str(load))
        put("exact_seconds", served.seconds, str(load))
    for name, distribution in (
        ("request_queue_time_seconds", statistics.queue_s),
        ("inter_token_latency_seconds", statistics.inter_token_s),
        ("engine_step_duration_seconds", statistics.step_s),
        ("engine_step_batch_size", statistics.step_sequences),
    ):
        family = families[name]
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric([model_id], _buckets(distribution), distribution.sum)


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Cumulative buckets as (upper bound, count). The counts are copied first, so that the buckets never decrease."""
    counts, total = list(distribution.counts), 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, distribution.bounds), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


# Metrics per router version, for comparing a canary with the version in use. Only loaded versions have series, and
# version 0, which stands for requests without a router.
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


def _version_families() -> dict[str, CounterMetricFamily]:
    """Empty metric families, by name without the prefix `neap_router_`."""
    families: dict[str, CounterMetricFamily] = {}
    for name, labels, text in _COUNTERS:
        families[name] = CounterMetricFamily(f"neap_router_{name}", text, labels=labels)
    return families


def _read_versions(
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
