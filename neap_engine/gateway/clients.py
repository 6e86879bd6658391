"""Tells clients apart, and learns from the workers which of them may generate before their requests are read."""

import ipaddress
import time
from typing import NamedTuple

from neap_client import AsyncNeapClient, ClientSecurity
from neap_client.addresses import is_loopback_target
from neap_client.channel import ON_BEHALF_KEY, Metadata
from neap_client.inference.v1 import inference_pb2
from neap_client.methods import GENERATE

from shared.errors import DeadlineExceeded, InvalidInput, NeapError, NotFound, PermissionDenied, Unauthenticated
from shared.gateway_settings import GatewaySettings
from shared.rpc.tokens import digest_of_token

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


# How long an answer of the workers holds. They check every call themselves, so an old answer lets in nothing but a
# body.
ANSWER_S = 60.0
# How many workers are asked, in turn, before a request fails because none answers in time.
NUM_ASKED = 3


class Client(NamedTuple):
    """`key` tells clients apart. `metadata`: of calls to the workers in its name."""

    key: str
    metadata: Metadata


class Clients:
    """Asks the workers who may generate, and remembers the answers for `ANSWER_S`.

    The question is a call of Generate without a model. A worker checks the caller before it looks for the model, so an
    error about the model means that the caller may generate. Refusals of tokens are not remembered, so a new token can
    be used at once.
    """

    def __init__(self, workers: AsyncNeapClient) -> None:
        self._workers = workers
        # Whether calls without a token may generate: None if they may, and the refusal if not.
        self._refusal: NeapError | None = None
        self._refusal_until_s: float | None = None
        self._known_until_s: dict[str, float] = {}

    async def identify(self, token: Metadata, address: str, request_id: str) -> Client:
        """Return the client that may generate with `token`: known by the token if the workers ask for one, else by the
        address, which they are told.

        Raises Unauthenticated or PermissionDenied as a worker does, and the errors of a call that reaches no worker.
        """
        now = time.monotonic()
        until_s = self._refusal_until_s
        # A client with a token asks nothing about calls without one, once it is known that tokens are needed.
        needs_answer = until_s is None or (now >= until_s and not (token and self._refusal))
        if needs_answer:
            self._refusal = await self._refusal_of((), request_id)
            self._refusal_until_s = now + ANSWER_S
        if self._refusal is None:
            key = address_key(address)
            return Client(key, (*token, (ON_BEHALF_KEY, key)))
        if not token:
            # Without the traceback of the last time, which would grow.
            raise self._refusal.with_traceback(None)
        # Without the scheme, which a client may write in many ways.
        key = digest_of_token(token[0][1].partition(" ")[2].strip())
        if now >= self._known_until_s.get(key, 0.0):
            refusal = await self._refusal_of(token, request_id)
            if refusal is not None:
                raise refusal
            self._known_until_s[key] = now + ANSWER_S
        return Client(key, token)

    async def _refusal_of(self, token: Metadata, request_id: str) -> NeapError | None:
        """Why a worker refuses calls with this token, None if it does not.
        Where one does not answer in time, the next one is asked."""
        for number in range(1, NUM_ASKED + 1):
            stream = self._workers.generate(
                inference_pb2.GenerateRequest(),
                timeout_s=UNARY_TIMEOUT_S / NUM_ASKED,
                request_id=f"{request_id}-access",
                metadata=token,
            )
            async with stream:
                try:
                    await stream.start()
                except (Unauthenticated, PermissionDenied) as refusal:
                    return refusal
                except (NotFound, InvalidInput):
                    return None
                except DeadlineExceeded:
                    if number == NUM_ASKED:
                        raise
        return None


def address_key(address: str) -> str:
    """Return the key of a client at `address`. One host has many IPv6 addresses, so they count by their first 64
    bits."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((int(ip), 64), strict=False))
