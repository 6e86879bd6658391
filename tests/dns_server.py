"""A DNS server on loopback for one name, whose addresses a test changes while clients ask for them."""

import ipaddress
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_TYPE_A = 1
_HEADER = struct.Struct(">HHHHHH")
# A response that is authoritative, without an error.
_FLAGS = 0x8580


class DnsServer:
    """Answers every A query with `addresses`, and queries of other types with no record. The time to live is 0."""

    def __init__(self, address: str, port: int, addresses: Sequence[str] = ()) -> None:
        self.addresses = list(addresses)
        self.num_queries = 0
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((address, port))
        self.port: int = self.socket.getsockname()[1]

    def serve(self) -> None:
        """Answers until the socket is shut down."""
        while True:
            query, client = self.socket.recvfrom(4096)
            if not query:
                return
            self.socket.sendto(self._answer(query), client)

    def _answer(self, query: bytes) -> bytes:
        end = query.index(b"\0", _HEADER.size) + 5  # the name, then type and class
        question = query[_HEADER.size : end]
        (kind,) = struct.unpack(">H", question[-4:-2])
        records = []
        if kind == _TYPE_A:
            self.num_queries += 1
            # 0xC00C points to the name in the question.
            records = [
                struct.pack(">HHHIH", 0xC00C, _TYPE_A, 1, 0, 4) + ipaddress.IPv4Address(address).packed
                for address in self.addresses
            ]
        (number,) = struct.unpack(">H", query[:2])
        return _HEADER.pack(number, _FLAGS, 1, len(records), 0, 0) + question + b"".join(records)


@contextmanager
def dns_server(addresses: Sequence[str] = (), *, address: str = "127.0.0.1", port: int = 0) -> Iterator[DnsServer]:
    server = DnsServer(address, port, addresses)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        # An empty datagram ends the loop.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.sendto(b"", (address, server.port))
        thread.join(60)
        server.socket.close()
