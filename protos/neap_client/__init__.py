"""Clients of neap's gRPC services.

    from neap_client import NeapClient, generate_request

    with NeapClient("127.0.0.1:7071") as client:
        client.wait_ready()  # if the worker may still load its models
        request = generate_request("my-model", "Why is the sky blue?", max_tokens=64)
        answer = client.answer(request)  # whole; `client.generate(request)` streams it
        print(answer.text, answer.usage, answer.depth)

`AsyncNeapClient` has the same methods for asyncio. A prompt is text, a list of
`ChatMessage(role="user", content="..")`, or `TokenIds(ids=[..])`. Errors are those of `neap_client.errors`, all of them
`NeapError` with a `reason` for programs. All other messages are in `neap_client.inference.v1.inference_pb2`,
`neap_client.calibration.v1.calibration_pb2` and `neap_client.router.v1.router_pb2`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neap_client import errors as errors
    from neap_client.aio import AsyncNeapClient as AsyncNeapClient
    from neap_client.aio_generation import AsyncGenerationStream as AsyncGenerationStream
    from neap_client.channel import ClientSecurity as ClientSecurity
    from neap_client.client import NeapClient as NeapClient
    from neap_client.errors import NeapError as NeapError
    from neap_client.generation import Answer as Answer
    from neap_client.inference.v1.inference_pb2 import ChatMessage as ChatMessage
    from neap_client.inference.v1.inference_pb2 import Constraint as Constraint
    from neap_client.inference.v1.inference_pb2 import TokenIds as TokenIds
    from neap_client.requests import generate_request as generate_request
    from neap_client.sync_generation import GenerationStream as GenerationStream

_HOMES = {
    "Answer": "generation",
    "AsyncGenerationStream": "aio_generation",
    "AsyncNeapClient": "aio",
    "ChatMessage": "inference.v1.inference_pb2",
    "ClientSecurity": "channel",
    "Constraint": "inference.v1.inference_pb2",
    "GenerationStream": "sync_generation",
    "NeapClient": "client",
    "NeapError": "errors",
    "TokenIds": "inference.v1.inference_pb2",
    "generate_request": "requests",
}
__all__ = [*_HOMES, "errors"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `neap_client.errors` alone does not import gRPC."""
    if name == "errors":
        return import_module(f"{__name__}.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
