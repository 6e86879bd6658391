"""Who comes first: of one priority clients take turns, and so do those behind one client; and who makes room for whom.

Fair queueing (Demers, Keshav and Shenker, SIGCOMM 1989), with every request as one unit: a request's turn is that of
its client's request before it and one, but never before the turn that has come. That moves on by one while each client
that waits gets a place. So whoever asks rarely is served soon, and what waits is overtaken by nobody for ever.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

# The turn of a request that was put back: before all others of its priority.
PUT_BACK = -1


class TakesTurns(Protocol):
    """`turn` is set by `Turns`. `on_behalf_of`: see `GenerationRequest`."""

    turn: float

    @property
    def client(self) -> str: ...
    @property
    def on_behalf_of(self) -> str: ...
    @property
    def priority(self) -> int: ...


class Runs(TakesTurns, Protocol):
    """`num_kv_tokens`: positions of keys and values that it may come to fill."""

    @property
    def num_kv_tokens(self) -> int: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def may_be_put_back(self) -> bool: ...


R = TypeVar("R", bound=Runs)


def owner_of(request: TakesTurns) -> tuple[str, str]:
    return request.client, request.on_behalf_of


class Turns:
    """Priorities have turns of their own."""

    def __init__(self) -> None:
        self._come: dict[int, float] = {}  # by priority: the turn that has come
        self._next: dict[tuple[int, str], float] = {}  # by priority and client, if it is later

    def next_of(self, request: TakesTurns) -> float:
        come = self._come.get(request.priority, 0.0)
        return max(come, self._next.get((request.priority, request.client), come))

    def wait(self, request: TakesTurns) -> None:
        """The request takes its turn among those that wait."""
        request.turn = self.next_of(request)
        self._next[request.priority, request.client] = request.turn + 1

    def put_back(self, request: TakesTurns, first: TakesTurns) -> None:
        """The request, which ran, waits again, for `first` to run: right after it, or, if `first` has a lower number,
        before all others of its own."""
        is_equal = request.priority == first.priority
        request.turn = max(self._come.get(request.priority, 0.0), first.turn) + 1 if is_equal else PUT_BACK

    def come(self, request: TakesTurns, waiting: Iterable[TakesTurns]) -> None:
        """The request's turn has come; these still wait."""
        priority = request.priority
        others = {one.client for one in waiting if one.priority == priority} - {request.client}
        moved = self._come.get(priority, 0.0) + (1 / (len(others) + 1) if others else 0.0)
        self._come[priority] = come = max(moved, request.turn)
        self._next = {key: turn for key, turn in self._next.items() if key[0] != priority or turn > come}

    def leave(self, request: TakesTurns, waiting: Iterable[TakesTurns]) -> None:
        """The request, which waited, does not any more: its client's next one need not come after it."""
        key = request.priority, request.client
        turns = [one.turn for one in waiting if (one.priority, one.client) == key]
        self._next.pop(key, None)
        if turns:
            self._next[key] = max(turns) + 1


def deal(added: TakesTurns, waiting: Sequence[TakesTurns], running: Iterable[TakesTurns]) -> None:
    """Divides the turns of a client's waiting requests, of which `added` is one, among those behind it."""
    key = added.client, added.priority
    mine = [one for one in waiting if (one.client, one.priority) == key and one.turn != PUT_BACK]
    turns = [one.turn for one in mine]
    num_before = Counter(one.on_behalf_of for one in running if one.client == added.client)

    def rank(one: TakesTurns) -> int:
        num_before[one.on_behalf_of] += 1
        return num_before[one.on_behalf_of]

    for one, turn in zip(sorted(mine, key=rank), turns, strict=True):
        one.turn = turn


def in_the_way(first: R, running: Sequence[R], num_missing_tokens: int, num_missing_places: int) -> list[R]:
    """The running requests that give so much to the first waiting one, as few as are needed: those with the highest
    numbers first, and of these those that started last. They have higher numbers than it, or the same if nothing of its
    owner runs and of theirs several do. None if all of them are not enough."""
    shares = Counter(map(owner_of, running))
    chosen: list[R] = []
    latest_first = list(reversed(running))
    for request in sorted(latest_first, key=lambda one: one.priority, reverse=True):
        owner, gives_way = owner_of(request), request.priority > first.priority
        if request.priority == first.priority:
            gives_way = shares[owner] > 1 and not shares[owner_of(first)]
        if not gives_way or not request.may_be_put_back:
            continue
        if num_missing_tokens > 0 or (num_missing_places > 0 and not request.is_paused):
            chosen.append(request)
            shares[owner] -= 1
            num_missing_tokens -= request.num_kv_tokens
            num_missing_places -= not request.is_paused
    return [] if num_missing_tokens > 0 or num_missing_places > 0 else chosen
