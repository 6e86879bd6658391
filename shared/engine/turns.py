"""The order of waiting requests of one priority: clients take turns, and so do those behind one client."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol


class TakesTurns(Protocol):
    """`turn`: how many requests of its `client` come before it, -1 if it was put back. `on_behalf_of`: see
    `GenerationRequest`."""

    turn: int

    @property
    def client(self) -> str: ...
    @property
    def on_behalf_of(self) -> str: ...
    @property
    def priority(self) -> int: ...


def next_turn(client: str, waiting: Iterable[TakesTurns], running: Iterable[TakesTurns]) -> int:
    """After those of the client's requests that wait, or as many as run."""
    turns = [request.turn for request in waiting if request.client == client and request.turn >= 0]
    return max(turns) + 1 if turns else sum(request.client == client for request in running)


def deal(added: TakesTurns, waiting: Sequence[TakesTurns], running: Iterable[TakesTurns]) -> None:
    """Divides the turns of a client's waiting requests, of which `added` is one, among those behind it."""
    key = added.client, added.priority
    mine = [request for request in waiting if (request.client, request.priority) == key and request.turn >= 0]
    turns = [request.turn for request in mine]
    num_before = Counter(request.on_behalf_of for request in running if request.client == added.client)

    def rank(request: TakesTurns) -> int:
        num_before[request.on_behalf_of] += 1
        return num_before[request.on_behalf_of]

    for request, turn in zip(sorted(mine, key=rank), turns, strict=True):
        request.turn = turn
