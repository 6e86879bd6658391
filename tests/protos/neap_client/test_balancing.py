"""A client shares its calls among the addresses of a name, and learns of new ones.
Real servers, each with an address of its own."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from neap_client import NeapClient
from neap_client.addresses import with_scheme
from neap_client.inference.v1 import inference_pb2

from shared.errors import InvalidInput
from tests.dns_server import DnsServer, dns_server
from tests.servers import free_ports
from tests.shared.rpc.conftest import Scripted, running
from tests.waiting import wait_until

NUM_TOKENS = 5
# Connections that end by age while calls begin.
NUM_CONNECTIONS = 150


class Replicas:
    """Servers at 127.0.0.2, 127.0.0.3, .. on one port, behind the name neap-worker."""

    def __init__(self, stack: ExitStack, dns: DnsServer) -> None:
        self._stack, self._dns = stack, dns
        (self._port,) = free_ports(1)
        self.target = f"dns://127.0.0.1:{dns.port}/neap-worker.example:{self._port}"
        self.servicers: list[Scripted] = []

    def start(self, max_connection_age_s: float = 0.3) -> Scripted:
        servicer = Scripted()
        servicer.on_generate = _generate
        address = f"127.0.0.{len(self.servicers) + 2}"
        listen = f"{address}:{self._port}"
        self._stack.enter_context(running(servicer, listen=listen, max_connection_age_s=max_connection_age_s))
        self.servicers.append(servicer)
        self._dns.addresses.append(address)
        return servicer

    @property
    def num_calls(self) -> list[int]:
        return [servicer.num_calls for servicer in self.servicers]


async def _generate(request, context):
    for number in range(NUM_TOKENS):
        yield inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text=str(number)))
        await asyncio.sleep(0)


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(stack, stack.enter_context(dns_server()))


def _generated(client: NeapClient) -> str:
    return "".join(event.chunk.text for event in client.generate(inference_pb2.GenerateRequest()))


def test_replicas_share_the_calls_and_a_new_one_gets_its_part(replicas):
    for _ in range(3):
        replicas.start()
    whole = "".join(map(str, range(NUM_TOKENS)))
    with NeapClient(replicas.target, num_attempts=1) as client:

        def called() -> bool:
            assert _generated(client) == whole
            return all(replicas.num_calls)

        def shares(num_calls: int) -> list[int]:
            before = replicas.num_calls
            for _ in range(num_calls):
                assert _generated(client) == whole
            return [now - old for now, old in zip(replicas.num_calls, before, strict=True)]

        wait_until(called)
        assert min(shares(30)) >= 5  # of 10 each; connections are renewed meanwhile
        replicas.start()
        wait_until(called)
        assert min(shares(40)) >= 5


@pytest.mark.full
def test_no_stream_is_lost_when_connections_end_by_age(replicas):
    """A stream that outlives many connections, and short calls that begin while connections end."""
    released = threading.Event()
    peers: set[str] = set()

    async def handle(request, context):
        peers.add(context.peer())
        yield inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text="a"))
        if request.text == "long":
            await asyncio.to_thread(released.wait)
        yield inference_pb2.GenerateResponse(chunk=inference_pb2.TokenChunk(text="b"))

    replicas.start(max_connection_age_s=0.02).on_generate = handle
    with NeapClient(replicas.target, num_attempts=1) as client:
        stream = client.generate(inference_pb2.GenerateRequest(text="long"))
        events = [next(stream)]

        def renewed(_: int) -> None:
            def called() -> bool:
                assert _generated(client) == "ab"
                return len(peers) >= NUM_CONNECTIONS

            wait_until(called)

        try:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(renewed, range(4)))
        finally:
            released.set()
        events += stream
        assert "".join(event.chunk.text for event in events) == "ab"


@pytest.mark.parametrize(
    ("target", "dialled"),
    [
        ("neap-worker:7071", "dns:///neap-worker:7071"),
        ("10.0.0.7:7071", "dns:///10.0.0.7:7071"),
        ("[::1]:7071", "dns:///[::1]:7071"),
        ("dns:///neap-worker:7071", "dns:///neap-worker:7071"),
        ("dns://127.0.0.1:53/neap-worker:7071", "dns://127.0.0.1:53/neap-worker:7071"),
        ("ipv4:10.0.0.7:1,10.0.0.8:1", "ipv4:10.0.0.7:1,10.0.0.8:1"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
        ("xds:///worker", "xds:///worker"),
    ],
)
def test_names_are_resolved_by_dns(target, dialled):
    assert with_scheme(target) == dialled


@pytest.mark.parametrize(
    "target",
    [
        "",
        "neap-worker",
        "[::1]",
        "::1",
        "dns:///neap-worker",
        "dns://127.0.0.1:53/neap-worker",
        "ipv4:10.0.0.7:1,10.0.0.8",
        "http://neap-worker:7071",
    ],
)
def test_a_target_without_a_port_is_refused_instead_of_port_443(target, make_client):
    with pytest.raises(InvalidInput, match="HOST:PORT") as caught, make_client(target):
        pass
    assert caught.value.reason == "BAD_ADDRESS"
