"""A request that ends the workers that get it does not end all of them."""

import asyncio
import socket
import threading
from contextlib import ExitStack, suppress

import pytest
from neap_client import AsyncNeapClient, NeapClient, generate_request
from neap_client.errors import Unavailable

from tests.reasons import raises

SETTINGS, HEADERS = 4, 1
NUM_WORKERS = 4


class DyingWorker:
    """Accepts connections of HTTP/2, and resets each once a call has begun. Must be closed."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_calls = 0
        threading.Thread(target=self._run, daemon=True).start()

    def close(self):
        self._listener.close()

    def _run(self):
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    self._serve(connection)

    def _serve(self, connection):
        connection.sendall(bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0]))
        with connection.makefile("rb") as stream:
            stream.read(24)  # the preface
            while header := stream.read(9):
                stream.read(int.from_bytes(header[:3], "big"))
                if header[3] == HEADERS:
                    self.num_calls += 1
                    linger = b"\1\0\0\0\0\0\0\0"
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    return


def ask(target, is_async):
    request = generate_request("tiny", "hi", raw=True)
    if not is_async:
        with NeapClient(target, num_attempts=NUM_WORKERS) as client:
            client.answer(request)
        return

    async def answer():
        async with AsyncNeapClient(target, num_attempts=NUM_WORKERS) as client:
            await client.answer(request)

    asyncio.run(answer())


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_is_lost_with_its_worker_is_repeated_once(is_async):
    with ExitStack() as stack:
        workers = [DyingWorker() for _ in range(NUM_WORKERS)]
        for worker in workers:
            stack.callback(worker.close)
        with raises(Unavailable, "LOST_WITH_WORKERS"):
            ask("ipv4:" + ",".join(worker.address for worker in workers), is_async)
        assert sum(worker.num_calls for worker in workers) == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_no_worker_gets_is_not_lost(is_async):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with raises(Unavailable, "GRPC_UNAVAILABLE"):
        ask(address, is_async)
