"""What the gateway asks the workers of its clients."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from neap_engine.gateway.clients import NUM_ASKED, Clients
from shared.errors import DeadlineExceeded, NotFound, Unauthenticated

HUNG = DeadlineExceeded("no answer")


class Stream:
    def __init__(self, answer: Exception) -> None:
        self._answer = answer

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def start(self) -> None:
        raise self._answer


def clients(*answers: Exception) -> Clients:
    left = iter(answers)
    workers: Any = SimpleNamespace(generate=lambda *_, **__: Stream(next(left)))
    return Clients(workers)


@pytest.mark.parametrize("num_hung", range(NUM_ASKED))
def test_a_worker_that_hangs_is_passed_over(num_hung):
    asked = clients(*[HUNG] * num_hung, NotFound("no model"))
    assert asyncio.run(asked.identify((), "10.0.0.7", "r")) == ("10.0.0.7", (("x-neap-client", "10.0.0.7"),))


def test_a_request_fails_where_all_workers_hang():
    with pytest.raises(DeadlineExceeded):
        asyncio.run(clients(*[HUNG] * NUM_ASKED).identify((), "10.0.0.7", "r"))


def test_a_refusal_after_a_worker_that_hangs_is_a_refusal():
    with pytest.raises(Unauthenticated):
        asyncio.run(clients(HUNG, Unauthenticated("who")).identify((), "10.0.0.7", "r"))
