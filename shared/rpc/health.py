"""The standard health service, including its method List."""

from collections.abc import Sequence
from typing import Any

from grpc_health.v1 import health, health_pb2


class HealthServicer(health.aio.HealthServicer):
    """Adds `List` to gRPC's own servicer, where the method would end as UNKNOWN.
    Lists `names` and "", the server itself."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = ("", *names)

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        ask = health_pb2.HealthCheckRequest
        statuses = {name: await self.Check(ask(service=name), context) for name in self._names}
        messages: Any = health_pb2  # the type stubs do not have List yet
        return messages.HealthListResponse(statuses=statuses)
