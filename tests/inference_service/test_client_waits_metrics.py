import asyncio

import pytest
from prometheus_client import CollectorRegistry

from inference_service.metrics import ClientWaitsCollector
from shared.errors import DeadlineExceeded
from shared.rpc.calls import ClientWaits


async def test_calls_without_a_request_are_exported():
    waits, registry = ClientWaits(request_timeout_s=0.05), CollectorRegistry()
    registry.register(ClientWaitsCollector(waits))
    waiting = asyncio.create_task(waits.request(asyncio.Event().wait))
    await asyncio.sleep(0)
    assert registry.get_sample_value("neap_calls_awaiting_request") == 1
    with pytest.raises(DeadlineExceeded):
        await waiting
    assert registry.get_sample_value("neap_calls_awaiting_request") == 0
    labels = {"reason": "REQUEST_TIMEOUT"}
    assert registry.get_sample_value("neap_calls_without_request_total", labels) == 1
