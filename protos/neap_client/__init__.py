"""Clients of neap's gRPC services.

`NeapClient` is synchronous, `AsyncNeapClient` is for asyncio. Messages are in `neap_client.inference.v1`,
`neap_client.calibration.v1` and `neap_client.router.v1`, errors in `neap_client.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neap_client.aio import AsyncNeapClient as AsyncNeapClient
    from neap_client.aio_generation import AsyncGenerationStream as AsyncGenerationStream
    from neap_client.channel import ClientSecurity as ClientSecurity
    from neap_client.client import NeapClient as NeapClient
    from neap_client.generation import GenerationStream as GenerationStream
    from neap_client.requests import generate_request as generate_request

_HOMES = {
    "AsyncGenerationStream": "aio_generation",
    "AsyncNeapClient": "aio",
    "ClientSecurity": "channel",
    "GenerationStream": "generation",
    "NeapClient": "client",
    "generate_request": "requests",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `neap_client.errors` alone does not import gRPC."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
