"""The Prometheus metrics of the gateway, described in docs/metrics.md."""

from shared.service_metrics import ServiceMetrics

LATENCY_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics(ServiceMetrics):
    """One registry with the metrics of HTTP requests and of this process. The number of label values is bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.gauge(
            "neap_gateway_requests_running",
            "HTTP requests to the API whose body has arrived and that are not answered yet",
        )
        self.body_bytes = self.gauge(
            "neap_gateway_body_bytes",
            "Bytes of bodies that arrive, of prompts on their way to workers, and of answers that are not streamed",
        )
        self.requests = self.counter(
            "neap_gateway_requests", "HTTP requests to the API by endpoint and status", ("endpoint", "status")
        )
        self.errors = self.counter(
            "neap_gateway_errors",
            "HTTP requests to the API that failed, by endpoint and reason",
            ("endpoint", "reason"),
        )
        self.duration = self.histogram(
            "neap_gateway_request_duration_seconds",
            "Time from the head of a request to the end of its response",
            ("endpoint",),
            buckets=LATENCY_BOUNDS_S,
        )
        self.first_token = self.histogram(
            "neap_gateway_time_to_first_token_seconds",
            "Time from the head of a request to the first token from a worker",
            ("endpoint",),
            buckets=LATENCY_BOUNDS_S,
        )
        self.resumptions = self.counter(
            "neap_gateway_resumptions", "Calls of workers that went on with an answer that another worker had begun"
        )
        self.tokens = self.counter("neap_gateway_generation_tokens", "Tokens received from workers")

    def begin(self, endpoint: str) -> None:
        """The series that alerts ask about are there at 0 from the start: one that is born at 1 has not increased."""
        self.errors.labels(endpoint, "INTERNAL")
