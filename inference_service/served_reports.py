"""Reports what a worker has served to the calibrator that judges router versions.

The sums are those that the engines keep anyway, so that a report which is lost is in the next one. A thread of its own
sends them; whatever happens to it, no request waits for it.
"""

import random
import threading
import uuid
from collections.abc import Callable, Sequence

import structlog
from neap_client import NeapClient
from neap_client.channel import ClientSecurity
from neap_client.router.v1 import router_pb2 as pb

from inference_service.metrics import WorkerMetrics
from shared.engine.engine import Engine
from shared.errors import InvalidInput, NeapError
from shared.served import Served, ServedKey

TIMEOUT_S = 5.0

log = structlog.get_logger("neap.worker")

Suspend = Callable[[str, frozenset[str]], object]


class ServedReports:
    """Begins at once. `engines` may grow meanwhile. `addresses`: the first that answers is used. `on_suspended` gets a
    model and the aliases behind which no router is to draft, after each report; what it was told last holds while no
    calibrator answers."""

    def __init__(
        self,
        engines: Sequence[Engine],
        addresses: Sequence[str],
        interval_s: float,
        *,
        metrics: WorkerMetrics,
        security: ClientSecurity | None = None,
        on_suspended: Suspend = lambda model_id, aliases: None,
    ) -> None:
        self._engines, self._interval_s = engines, interval_s
        self._metrics, self._on_suspended = metrics, on_suspended
        self._clients = [
            NeapClient(address, security=security, timeout_s=TIMEOUT_S, num_attempts=1, has_affinity=False)
            for address in addresses
        ]
        self._place = 0  # of the client that answered last
        self._worker_id, self._sequence = uuid.uuid4().hex, 0
        self._fails = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neap-served-reports", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Waits for a report under way, which takes TIMEOUT_S at most."""
        self._stopping.set()
        self._thread.join()
        for client in self._clients:
            client.close()

    def _run(self) -> None:
        # Workers that were started together do not report together.
        while not self._stopping.wait(self._interval_s * random.uniform(0.9, 1.1)):
            for engine in tuple(self._engines):
                try:
                    self._report(engine.loaded.model_id, dict(engine.statistics.served.by_key))
                except Exception as error:
                    self._failed(error)
                else:
                    self._metrics.served_reports.labels("sent").inc()
                    if self._fails:
                        log.info("what is served is reported again")
                    self._fails = False

    def _report(self, model_id: str, served: dict[ServedKey, Served]) -> None:
        self._sequence += 1
        response = self._clients[self._place].report_served(
            pb.ReportServedRequest(
                worker_id=self._worker_id,
                sequence=self._sequence,
                model_id=model_id,
                served=[_entry(key, sums) for key, sums in served.items()],
            )
        )
        self._on_suspended(model_id, frozenset(response.suspended_aliases))

    def _failed(self, error: Exception) -> None:
        """The next report asks the next calibrator. One that was refused as wrong is begun anew, under another id."""
        reason = error.reason if isinstance(error, NeapError) else "INTERNAL"
        self._metrics.served_reports.labels(reason).inc()
        if not self._fails:
            log.warning("what is served cannot be reported", reason=reason, exc_info=not isinstance(error, NeapError))
        self._fails = True
        self._place = (self._place + 1) % len(self._clients)
        if isinstance(error, InvalidInput):
            self._worker_id, self._sequence = uuid.uuid4().hex, 0


def _entry(key: ServedKey, sums: Served) -> pb.Served:
    whole = {name: int(getattr(sums, name)) for name in ("num_requests", "num_tokens", "num_passes", "num_drafted")}
    parts = {name: getattr(sums, name) for name in ("seconds", "full_seconds", "weight", "weighted_log")}
    return pb.Served(alias=key.alias, version=key.version, load=key.load, **whole, **parts)
