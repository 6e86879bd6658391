"""A request that ends the workers that get it, at once or in the middle of its answer, does not end all of them."""

import asyncio
import socket
import threading
from contextlib import ExitStack, suppress

import pytest
from neap_client import AsyncNeapClient, NeapClient, errors, generate_request
from neap_client.errors import Unavailable
from neap_client.generation import FEW_TOKENS, MAX_LOST_BEGUN, MAX_RESUMPTIONS
from neap_client.inference.v1 import inference_pb2 as pb

from tests.reasons import raises

SETTINGS, HEADERS = 4, 1
NUM_WORKERS = 4
REQUEST = pb.GenerateRequest(model_id="m")
CHUNK = pb.GenerateResponse(chunk=pb.TokenChunk(text="a", tokens=[pb.Token(id=97)]))
FINISHED = pb.GenerateResponse(finished=pb.Finished(text="!"))


@pytest.fixture
def client(server, make_client):
    with make_client(server.target, num_attempts=3) as client:
        yield client


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


@pytest.mark.parametrize("num_tokens", [1, FEW_TOKENS - 1, FEW_TOKENS])
def test_only_a_service_that_brings_answers_forward_is_asked_for_ever(scripted, client, num_tokens):
    asked, many = [], MAX_RESUMPTIONS + 3

    async def generate(request, context):
        asked.append(len(request.resume.token_ids))
        yield pb.GenerateResponse(started=pb.Started(num_resumed_tokens=asked[-1]))
        for _ in range(num_tokens):
            yield CHUNK
        if len(asked) < many:
            raise errors.Unavailable("gone")
        yield FINISHED

    scripted.on_generate = generate
    if num_tokens == FEW_TOKENS:
        assert len(client.answer(REQUEST).token_ids) == many * num_tokens
        return
    with pytest.raises(errors.Unavailable, match="gone"):
        list(client.generate(REQUEST))
    assert asked == [num_tokens * number for number in range(MAX_RESUMPTIONS + 1)]


@pytest.mark.parametrize("num_tokens", [0, 1, FEW_TOKENS - 1, FEW_TOKENS])
def test_an_answer_that_workers_are_lost_with_is_given_up(scripted, make_client, server, num_tokens):
    """Unless it comes forward in between. A worker that says that it stops is not lost."""
    asked, many = [], MAX_LOST_BEGUN + 3

    async def generate(request, context):
        asked.append(len(request.resume.token_ids))
        yield pb.GenerateResponse(started=pb.Started(num_resumed_tokens=asked[-1]))
        for _ in range(num_tokens if len(asked) > 1 else 1):
            yield CHUNK
        if len(asked) == 1:
            raise errors.Unavailable("gone", reason="SHUTTING_DOWN")
        if len(asked) < many:
            raise errors.Unavailable("Socket closed", reason="GRPC_UNAVAILABLE")
        yield FINISHED

    scripted.on_generate = generate
    with make_client(server.target, num_attempts=many) as client:
        if num_tokens == FEW_TOKENS:
            assert len(client.answer(REQUEST).token_ids) == 1 + (many - 1) * num_tokens
            return
        with raises(errors.Unavailable, "LOST_WITH_WORKERS"):
            list(client.generate(REQUEST))
    assert len(asked) == 1 + MAX_LOST_BEGUN
