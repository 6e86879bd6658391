"""What a service tells Prometheus about its certificate and about calls it refused. docs/security.md explains each."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.rpc.security import ServerSecurity
from shared.rpc.watched_files import WatchedFiles


class SecurityCollector(Collector):
    """Reads `security`'s own counters when asked. Nothing is exported of what is off."""

    def __init__(self, security: ServerSecurity) -> None:
        self._security = security

    def collect(self) -> Iterator[Metric]:
        certificate, access = self._security.certificate, self._security.access
        watched: dict[str, WatchedFiles[Any]] = {}
        if certificate is not None:
            watched["certificate"] = certificate.files
            yield GaugeMetricFamily(
                "neap_tls_certificate_expiry_time_seconds",
                "When the certificate in use expires, in Unix time.",
                value=certificate.expiry_time_s,
            )
        if access.files is not None:
            watched["tokens"] = access.files
            refused = CounterMetricFamily(
                "neap_unauthorized_calls",
                "Calls refused for their token or its roles, by the reason in their ErrorInfo.",
                labels=["reason"],
            )
            for reason, count in dict(access.refusals).items():
                refused.add_metric([reason], count)
            yield refused
        if watched:
            reloads = CounterMetricFamily(
                "neap_security_reloads",
                'Changes of the files of a kind; result "refused": they could not be used, and the ones before stay.',
                labels=["kind", "result"],
            )
            for kind, files in watched.items():
                reloads.add_metric([kind, "taken"], files.num_reloads)
                reloads.add_metric([kind, "refused"], files.num_refused)
            yield reloads
