"""`python -m calibrator_service`: serves calibration jobs and the registry of routers over gRPC."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import structlog
from neap_client.calibration.v1 import calibration_pb2_grpc
from neap_client.router.v1 import router_pb2_grpc

from calibrator_service import router_servicer, servicer
from calibrator_service.job_process import JobFolder
from calibrator_service.judge.judge import Judge
from calibrator_service.learning.schedule import LearningSchedule
from calibrator_service.metrics import CalibratorMetrics
from calibrator_service.supervisor import Supervisor
from calibrator_service.watchers import Watchers
from shared.blocking import BlockingPool
from shared.calibrator_settings import CalibratorSettings
from shared.config import make_settings
from shared.cpus import size_thread_pools
from shared.exchange.signatures import verifier_of
from shared.registry.factory import open_registry
from shared.rpc.callers import caller_name
from shared.rpc.logs import log_all_output
from shared.rpc.security import SecurityCollector, open_security
from shared.rpc.serving import RpcServer
from shared.security_settings import ClientSettings
from shared.service_main import run_service
from shared.service_metrics import serve_metrics
from shared.timeouts import ROUTER_CALL_WAIT_S
from shared.traffic.traffic import open_traffic

# How long a stop waits for the judge's step.
JUDGE_TIMEOUT_S = 5.0

log = structlog.get_logger("neap.calibration")


async def serve(settings: CalibratorSettings) -> int:
    """Serves until SIGTERM, SIGINT or the death of the queue's thread.
    Returns the exit status: 1 after such a death, else 0.

    Raises NeapError if the registry, the data folder or the address cannot be used.
    """
    if settings.text_workers:
        make_settings(ClientSettings)  # wrong settings are noticed now, and not by a job
    security = open_security(settings, settings.listen)
    # Calls about jobs do not use the registry, so one that hangs must not delay them.
    job_pool = BlockingPool(name="neap-jobs", client=caller_name)
    router_pool = BlockingPool(name="neap-routers", max_wait_s=ROUTER_CALL_WAIT_S, client=caller_name)
    watchers, metrics = Watchers(), CalibratorMetrics()
    metrics.registry.register(SecurityCollector(security))
    verifier = verifier_of(settings.require_signatures)
    registry = open_registry(settings.registry)
    judge: Judge | None = None
    if settings.judge != "off":
        judge = Judge(registry, tuple(settings.sources), metrics=metrics, first_share=settings.judge_first_share)
    try:
        supervisor = Supervisor(
            JobFolder(settings.data_dir / "calibrator"),
            settings,
            metrics=metrics,
            on_change=watchers.notify,
            judge=judge if settings.judge == "publications" else None,
        )
        schedule: LearningSchedule | None = None
        if settings.learn_from_traffic:
            traffic = open_traffic(settings.registry, settings.traffic_key)
            schedule = LearningSchedule(
                registry,
                traffic,
                supervisor.store,
                settings,
                supervisor.queue.wake,
                judge.has_lost if judge is not None else lambda model_id, alias: False,
                metrics=metrics,
            )
        try:
            services = (servicer.SERVICE_NAME, router_servicer.SERVICE_NAME)
            server = RpcServer(settings, services, security=security, on_stop=watchers.stop)
            calibration_pb2_grpc.add_CalibrationServiceServicer_to_server(
                servicer.CalibrationServicer(
                    supervisor, pool=job_pool, watchers=watchers, registry=registry, registry_pool=router_pool
                ),
                server.grpc_server,
            )
            router_pb2_grpc.add_RouterServiceServicer_to_server(
                router_servicer.RouterServicer(
                    registry,
                    models=settings.sources,
                    pool=router_pool,
                    watchers=watchers,
                    verifier=verifier,
                    judge=judge,
                ),
                server.grpc_server,
            )

            loop = asyncio.get_running_loop()

            async def prepare() -> None:
                # A service without its queue is useless. It reports NOT_SERVING, drains and ends, and is then
                # restarted.
                supervisor.start(on_failure=partial(_stop_soon, loop, server))
                if schedule is not None:
                    schedule.thread.start(partial(_stop_soon, loop, server))
                if judge is not None:
                    judge.thread.start(partial(_stop_soon, loop, server))

            with serve_metrics(settings.metrics_listen, metrics.registry):
                await server.run(prepare)
            threads = [part.thread for part in (schedule, judge) if part is not None]
            return 1 if supervisor.has_died or any(thread.has_died for thread in threads) else 0
        finally:
            if schedule is not None:
                await asyncio.to_thread(schedule.stop)
            if judge is not None:
                await asyncio.to_thread(judge.stop, JUDGE_TIMEOUT_S)
            await asyncio.to_thread(supervisor.stop)
    finally:
        job_pool.close()
        router_pool.close()
        registry.close()


def _stop_soon(loop: asyncio.AbstractEventLoop, server: RpcServer) -> None:
    """Stops the server; called from the queue's thread."""
    with suppress(RuntimeError):  # the loop is gone: the service is ending
        loop.call_soon_threadsafe(server.request_stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: that of `serve`, or 2 for a configuration that cannot work."""
    return run_service(CalibratorSettings, "python -m calibrator_service", "neap-calibrator", serve, argv)


if __name__ == "__main__":
    log_all_output()
    size_thread_pools()  # the jobs' processes inherit it
    sys.exit(main())
