"""Binds so many ladders as an engine does whose memory has room for no more."""

from collections.abc import Callable

from shared.ladder.ladder import Ladder


class FewLadders:
    """A `Binder`, and its `BoundLadders`. To be asked for a ladder is a use of it."""

    def __init__(self, count: int = 4, on_prepare: Callable[[Ladder], object] = lambda ladder: None) -> None:
        self._count, self._on_prepare = count, on_prepare
        self._bound: dict[int, Ladder] = {}
        self.kept: Ladder | None = None
        self.ladders = self

    def prepare(self, ladder: Ladder) -> None:
        self._on_prepare(ladder)
        self._bound[id(ladder)] = ladder
        *older, _ = self._bound
        for key in sorted(older, key=id(self.kept).__eq__)[: max(len(self._bound) - self._count, 0)]:
            del self._bound[key]

    def has(self, ladder: Ladder) -> bool:
        if id(ladder) in self._bound:
            self._bound[id(ladder)] = self._bound.pop(id(ladder))
        return id(ladder) in self._bound

    def has_room_for(self, count: int) -> bool:
        return len(self._bound) + count <= self._count
