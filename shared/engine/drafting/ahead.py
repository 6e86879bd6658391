"""The drafts that an exit has made for the next positions of a chain, because one call may draft many."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shared.ladder.native_chain import HeadDraft


@dataclass
class Ahead:
    """How far an exit is with one chain.

    Its head has seen the first `num_seen` tokens; `output` [W] is its output for the last of them, None if it has seen
    none. Its drafts of later positions hold as long as the chain takes them.
    """

    num_seen: int = 0
    output: Tensor | None = None
    _newest: int | None = None
    _drafts: deque[HeadDraft] = field(default_factory=deque)

    @property
    def has_drafts(self) -> bool:
        return bool(self._drafts)

    def put(self, drafts: Sequence[HeadDraft]) -> None:
        """Adds drafts of the next position and of those after it."""
        self._drafts.extend(drafts)

    def take(self, num_tokens: int) -> HeadDraft | None:
        """The draft of the next position of a chain of `num_tokens` tokens. None if there is none."""
        if not self._drafts:
            return None
        head_draft = self._drafts.popleft()
        self.output = head_draft.output
        self.num_seen, self._newest = num_tokens, head_draft.draft.token
        return head_draft

    def follow(self, token: int) -> None:
        """The chain has been extended by `token`. If the exit has drafted another one, its later drafts are void."""
        if token != self._newest:
            self._drafts.clear()
