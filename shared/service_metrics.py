"""What the Prometheus metrics of all services begin with."""

from functools import partial

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# Creation times of counters would double the number of series, and nothing uses them.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class ServiceMetrics:
    """One registry with the metrics of this process. A service adds its own with `counter`, `gauge` and `histogram`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        self.counter = partial(Counter, registry=self.registry)
        self.gauge = partial(Gauge, registry=self.registry)
        self.histogram = partial(Histogram, registry=self.registry)
