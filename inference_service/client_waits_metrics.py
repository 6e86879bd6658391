"""Prometheus metrics of calls that are open and whose request message has not arrived."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.rpc.calls import ClientWaits


class ClientWaitsCollector(Collector):
    """Reads the server's counters at each scrape."""

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
