"""The Prometheus metrics of the gateway, described in docs/metrics.md."""

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

# Creation times of counters would double the number of series, and nothing uses them.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class GatewayMetrics:
    """One registry with the metrics of HTTP requests and of this process. The number of label values is bounded."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        self.running = Gauge(
            "neap_gateway_requests_running",
            "HTTP requests to the API whose body has arrived and that are not answered yet",
            registry=self.registry,
        )
        self.body_bytes = Gauge(
            "neap_gateway_body_bytes",
            "Bytes of bodies that arrive, and of prompts on their way to workers",
            registry=self.registry,
        )
        self.requests = Counter(
            "neap_gateway_requests",
            "HTTP requests to the API by endpoint and status",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.errors = Counter(
            "neap_gateway_errors",
            "HTTP requests to the API that failed, by endpoint and reason",
            ("endpoint", "reason"),
            registry=self.registry,
        )
        self.duration = Histogram(
            "neap_gateway_request_duration_seconds",
            "Time from the head of a request to the end of its response",
            ("endpoint",),
            buckets=LATENCY_BOUNDS_S,
            registry=self.registry,
        )
        self.first_token = Histogram(
            "neap_gateway_time_to_first_token_seconds",
            "Time from the head of a request to the first token from a worker",
            ("endpoint",),
            buckets=LATENCY_BOUNDS_S,
            registry=self.registry,
        )
        self.resumptions = Counter(
            "neap_gateway_resumptions",
            "Calls of workers that went on with an answer that another worker had begun",
            registry=self.registry,
        )
        self.tokens = Counter("neap_gateway_generation_tokens", "Tokens received from workers", registry=self.registry)
