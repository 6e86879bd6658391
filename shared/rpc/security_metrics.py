"""Prometheus metrics about a service's certificate and refused calls. docs/security.md explains each of them."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.rpc.security import ServerSecurity
from shared.rpc.watched_files import WatchedFiles


class SecurityCollector(Collector):
    """Reads the counters of `security` at each scrape. Features that are off export no metrics."""

    def __init__(self, security: ServerSecurity) -> None:
        self._security = security

    def collect(self) -> Iterator[Metric]:
        certificate, access = self._security.certificate, self._security.access
        watched: dict[str, WatchedFiles[Any]] = {}
        if certificate is not None:
            watched["certificate"] = certificate.files
            yield GaugeMetricFamily(
                "neap_tls_certificate_expiry_time_seconds",
                "Expiry time of the certificate in use, in Unix seconds.",
                value=certificate.expiry_time_s,
            )
        if access.files is not None:
            watched["tokens"] = access.files
            refused = CounterMetricFamily(
                "neap_unauthorized_calls",
                "Calls refused because of their token or its roles, by the reason in their ErrorInfo.",
                labels=["reason"],
            )
            for reason, count in dict(access.refusals).items():
                refused.add_metric([reason], count)
            yield refused
        if watched:
            reloads = CounterMetricFamily(
                "neap_security_reloads",
                'Changes of the files of a kind. Result "refused": the new files could not be used, so the old ones '
                "stay in use.",
                labels=["kind", "result"],
            )
            for kind, files in watched.items():
                reloads.add_metric([kind, "taken"], files.num_reloads)
                reloads.add_metric([kind, "refused"], files.num_refused)
            yield reloads
