"""`python -m calibrator_service`: calibration jobs and the catalogue of routers, over gRPC."""

import asyncio
import sys
from collections.abc import Sequence

import structlog
from neap.calibration.v1 import calibration_pb2_grpc
from neap.router.v1 import router_pb2_grpc

from calibrator_service import router_servicer, servicer
from calibrator_service.blocking import BlockingPool, Watchers
from calibrator_service.process_config import DEFAULT_RECIPE, JobFolder, ModelOptions
from calibrator_service.supervisor import Supervisor, SupervisorConfig
from shared.config import CalibratorSettings, settings_from_command_line
from shared.cpus import size_thread_pools
from shared.errors import NeapError
from shared.registry.factory import open_registry
from shared.rpc.logs import configure_logging
from shared.rpc.security import ServerSecurity, open_security
from shared.rpc.service_logs import log_all_output, log_stdout, say_why_not
from shared.rpc.serving import RpcServer
from shared.rpc.trace_export import traces_exported

log = structlog.get_logger("neap.calibration")


class CalibratorServer(RpcServer):
    """Watch streams have no end of their own, so they are ended as soon as a stop is asked for."""

    def __init__(
        self, settings: CalibratorSettings, watchers: Watchers, security: ServerSecurity
    ) -> None:
        super().__init__(
            settings.listen,
            (servicer.SERVICE_NAME, router_servicer.SERVICE_NAME),
            grace_s=settings.grace_s,
            drain_timeout_s=settings.drain_timeout_s,
            security=security,
            health_listen=settings.health_listen,
            request_timeout_s=settings.request_timeout_s,
        )
        self._watchers = watchers

    def request_stop(self) -> None:
        self._watchers.stop()
        super().request_stop()


async def serve(settings: CalibratorSettings, *, recipe: str = DEFAULT_RECIPE) -> None:
    """Until SIGTERM or SIGINT. Raises NeapError when the registry, the data folder or the address cannot be had."""
    models = {model.model_id: model.source for model in settings.models}
    security = open_security(settings, settings.listen)
    pool, watchers = BlockingPool(), Watchers()
    registry = open_registry(settings.registry)
    try:
        supervisor = Supervisor(
            JobFolder(settings.data_dir / "calibrator"),
            SupervisorConfig(
                models=models,
                registry=settings.registry,
                text_folders=settings.text_folders,
                options=ModelOptions(
                    device=settings.device,
                    dtype=settings.dtype,
                    context_length=settings.context_length,
                    threads=settings.threads,
                ),
                log_level=settings.log_level,
                recipe=recipe,
            ),
        )
        try:
            server = CalibratorServer(settings, watchers, security)
            calibration_pb2_grpc.add_CalibrationServiceServicer_to_server(
                servicer.CalibrationServicer(
                    supervisor,
                    models,
                    settings.text_folders,
                    max_queued_jobs=settings.max_queued_jobs,
                    pool=pool,
                    watchers=watchers,
                ),
                server.grpc_server,
            )
            router_pb2_grpc.add_RouterServiceServicer_to_server(
                router_servicer.RouterServicer(registry, pool=pool, watchers=watchers),
                server.grpc_server,
            )

            async def prepare() -> None:
                supervisor.start()

            await server.run(prepare)
        finally:
            await asyncio.to_thread(supervisor.stop)
    finally:
        pool.close()
        registry.close()


def main(argv: Sequence[str] | None = None, *, recipe: str = DEFAULT_RECIPE) -> int:
    """Exit status 0 after a stop that was asked for, 2 for a configuration that cannot work."""
    try:
        settings = settings_from_command_line(
            CalibratorSettings, "python -m calibrator_service", argv
        )
        configure_logging(settings.log_level)
        log_stdout()
        with traces_exported(settings.exports_traces, "neap-calibrator"):
            asyncio.run(serve(settings, recipe=recipe))
    except NeapError as error:
        say_why_not(error)
        return 2
    return 0


if __name__ == "__main__":
    log_all_output()
    size_thread_pools()  # the jobs' processes inherit it
    sys.exit(main())
