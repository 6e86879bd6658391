"""The gateway's client of the workers."""

from neap_client import AsyncNeapClient, ClientSecurity
from neap_client.addresses import is_loopback_target
from neap_client.methods import GENERATE

from shared.errors import InvalidInput
from shared.gateway_settings import GatewaySettings

SERVICE_NAME = GENERATE.service
UNARY_TIMEOUT_S = 10.0


def open_client(settings: GatewaySettings) -> AsyncNeapClient:
    """Return a client of the workers that serve. Belongs to the running event loop.

    Raises InvalidInput: TOKENS_OVER_PLAIN_TEXT if clients' tokens would be sent to another machine in plain text, and
    what `neap_client.channel.open_channel` raises for files that cannot be used.
    """
    security = ClientSecurity(
        tls=settings.worker_tls,
        ca=settings.worker_ca,
        certificate=settings.worker_cert,
        key=settings.worker_key,
        server_name=settings.worker_server_name,
    )
    needs_no_tls = settings.drop_tokens or settings.allow_plaintext_tokens
    if not (security.is_encrypted or needs_no_tls or is_loopback_target(settings.workers)):
        raise InvalidInput(
            f"tokens of clients would be sent to {settings.workers} in plain text: set --worker-ca or --worker-tls; if "
            "the workers need no tokens, --drop-tokens; if something else encrypts the connection, "
            "--allow-plaintext-tokens",
            reason="TOKENS_OVER_PLAIN_TEXT",
        )
    return AsyncNeapClient(
        settings.workers,
        security=security,
        timeout_s=UNARY_TIMEOUT_S,
        num_attempts=settings.num_attempts,
        # A client of the gateway is told to wait, and decides itself.
        waits_when_full=False,
        health_service=SERVICE_NAME,
        has_affinity=settings.prefix_affinity,
        resumes=settings.resumes,
        stall_timeout_s=settings.worker_stall_timeout_s,
    )
