"""The standard health service, whole."""

from collections.abc import Sequence
from typing import Any

from grpc_health.v1 import health, health_pb2


class HealthServicer(health.aio.HealthServicer):
    """gRPC's own, with `List`, which that leaves out: it would end as UNKNOWN. `names` are listed; "" is the server itself."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = ("", *names)

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        ask = health_pb2.HealthCheckRequest
        statuses = {name: await self.Check(ask(service=name), context) for name in self._names}
        messages: Any = health_pb2  # whose stubs are older than List
        return messages.HealthListResponse(statuses=statuses)
