"""Requests that begin alike go to the worker that has read their beginning before.

The client ranks the workers for each beginning by rendezvous hashing: all clients rank alike, and where a worker comes
or goes, only what it ranks first for moves.
"""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from neap_client.addresses import hosts_of
from neap_client.inference.v1 import inference_pb2 as pb

# In a call's metadata: the address that it is to go to. See `neap_client.channel`.
WORKER_KEY = "neap-worker"
# So much of a prompt that is no chat counts as its beginning, because a longer prompt may begin with it.
NUM_CHARS, NUM_IDS = 256, 64
# A worker that has so many times its share of the client's running calls is asked last.
MOST_SHARES = 1.25
RESOLVE_S = 5.0


def prefix_key(request: pb.GenerateRequest) -> str:
    """Return what all requests with the beginning of this prompt have in common, empty without a prompt.

    A chat's beginning ends with the user's first message: it stays the same in each of its turns, and tells chats apart
    that share a system message.
    """
    if request.HasField("chat"):
        begun: list[tuple[str, str]] = []
        for message in request.chat.messages:
            begun.append((message.role, message.content))
            if message.role == "user":
                break
        text = repr(begun)
    elif request.HasField("token_ids"):
        text = repr(request.token_ids.ids[:NUM_IDS])
    elif request.text:
        text = request.text[:NUM_CHARS]
    else:
        return ""
    return _hash(text).hex()


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


class KnownWorkers:
    """The addresses of a target. Names are resolved in a thread, again after RESOLVE_S. Thread-safe."""

    def __init__(self, target: str) -> None:
        self._hosts = hosts_of(target)
        self._lock = threading.Lock()
        self._addresses: frozenset[str] = frozenset()
        # Running calls of this client, by address.
        self._num_running: Counter[str] = Counter()
        # When to resolve names again, by `time.monotonic`.
        self._due_s = 0.0
        try:
            self._addresses = frozenset(self._resolved(socket.AI_NUMERICHOST))
            self._hosts = []
        except OSError:
            self._resolve_if_due()

    def ranked(self, prefix: str) -> list[str]:
        """Return the addresses in the order in which they are to be asked. Empty if there is no choice or no prefix.

        Those that have more than their part of the running calls come last, so that a popular prefix is shared.
        """
        self._resolve_if_due()
        addresses = self._addresses
        if not prefix or len(addresses) < 2:
            return []
        with self._lock:
            running = dict(self._num_running)
        share = (1 + sum(running.values())) / len(addresses)

        def rank(address: str) -> tuple[bool, bytes]:
            num_running = running.get(address, 0)
            is_full = num_running > 1 and num_running >= MOST_SHARES * share
            return is_full, _hash(f"{address} {prefix}")

        return sorted(addresses, key=rank)

    def count(self, address: str, call: Any) -> None:
        """Count a call as running at the address until it ends."""
        with self._lock:
            self._num_running[address] += 1
        call.add_done_callback(lambda _: self._ended(address))

    def _ended(self, address: str) -> None:
        with self._lock:
            self._num_running[address] -= 1
            if not self._num_running[address]:
                del self._num_running[address]

    def _resolve_if_due(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            if not self._hosts or now_s < self._due_s:
                return
            self._due_s = now_s + RESOLVE_S
        threading.Thread(target=self._resolve, daemon=True).start()

    def _resolve(self) -> None:
        with suppress(OSError):  # what was known stays
            self._addresses = frozenset(self._resolved())

    def _resolved(self, flags: int = 0) -> Iterator[str]:
        """Raises OSError for what is not resolved."""
        for host, port in self._hosts:
            addresses: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
            for family, *_, place in addresses:
                address = f"[{place[0]}]" if family == socket.AF_INET6 else place[0]
                yield f"{address}:{place[1]}"
