"""`python -m neap_engine.gateway`: OpenAI's HTTP API in front of neap's workers."""

import sys
from collections.abc import Sequence

from neap_engine.gateway.app import Gateway
from neap_engine.gateway.clients import open_client
from neap_engine.gateway.metrics import GatewayMetrics
from neap_engine.gateway.server import GatewayServer
from shared.gateway_settings import GatewaySettings
from shared.rpc.logs import log_all_output
from shared.rpc.security import SecurityCollector
from shared.service_main import run_service
from shared.service_metrics import serve_metrics


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
    """Serves until SIGTERM. Returns the process' exit status."""
    return run_service(GatewaySettings, "python -m neap_engine.gateway", "neap-gateway", serve, argv)


if __name__ == "__main__":
    log_all_output()
    sys.exit(main())
