"""`python -m neap_engine.gateway`: OpenAI's HTTP API in front of neap's workers."""

import asyncio
import sys
from collections.abc import Sequence

from neap_engine.gateway.app import Gateway
from neap_engine.gateway.metrics import GatewayMetrics
from neap_engine.gateway.server import GatewayServer
from neap_engine.gateway.workers import open_client
from shared.config import settings_from_command_line
from shared.errors import NeapError
from shared.gateway_settings import GatewaySettings
from shared.metrics_server import serve_metrics
from shared.rpc.logs import configure_logging
from shared.rpc.security_metrics import SecurityCollector
from shared.rpc.service_logs import log_all_output, log_stdout, report_start_failure
from shared.rpc.trace_export import export_traces


async def serve(settings: GatewaySettings) -> int:
    """Serves until SIGTERM. Raises NeapError if it cannot start."""
    metrics = GatewayMetrics()
    workers = open_client(settings)
    try:
        server = GatewayServer(settings, Gateway(settings, workers, metrics))
        metrics.registry.register(SecurityCollector(server.security))
        server.handle_signals()
        with serve_metrics(settings.metrics_listen, metrics.registry):
            await server.run()
    finally:
        await workers.close()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process' exit status: 0, or 2 if it cannot start with these settings."""
    configure_logging()
    try:
        settings = settings_from_command_line(GatewaySettings, "python -m neap_engine.gateway", argv)
        configure_logging(settings.log_level)
        log_stdout()
        with export_traces(settings.exports_traces, "neap-gateway"):
            return asyncio.run(serve(settings))
    except NeapError as error:
        report_start_failure(error)
        return 2


if __name__ == "__main__":
    log_all_output()
    sys.exit(main())
