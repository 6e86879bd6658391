"""The tokens that a deep pass settles together, and how deep each of them has been."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from shared.ladder.rungs import Draft
from shared.model.cache import SlotCache
from shared.model.runner import DepthRunner


@dataclass
class Chain:
    """The last final token, at position `base`, and what was drafted after it.

    The first `num_final` drafts are final already (policy relaxed). `probabilities` are the drafts' own, as trusted for this
    request. `reached[i]` is the depth that the chain's i-th token has been to, `states[i]` [D] its state there, None at depth 0.
    """

    base: int
    tokens: list[int]
    cache: SlotCache
    drafts: list[Draft] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    num_final: int = 0
    reached: list[int] = field(default_factory=list)
    states: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached, self.states = [0] * len(self.tokens), [None] * len(self.tokens)

    def append(self, draft: Draft, probability: float) -> None:
        self.drafts.append(draft)
        self.probabilities.append(probability)
        self.tokens.append(draft.token)
        self.reached.append(0)
        self.states.append(None)

    def truncate(self, num_drafts: int) -> None:
        """Forgets drafts; their shallow keys and values are overwritten by whatever comes to stand there."""
        del self.drafts[num_drafts:], self.probabilities[num_drafts:]
        del self.tokens[num_drafts + 1 :], self.reached[num_drafts + 1 :]
        del self.states[num_drafts + 1 :]

    def bring_to(self, depth: int, runner: DepthRunner) -> None:
        """Takes every token that has not been to `depth` there. Tokens equally deep go in one pass, earlier ones first."""
        for start, end, first in list(self._groups_below(depth)):
            hidden = None
            if first:
                hidden = torch.stack([s for s in self.states[start:end] if s is not None])[None]
            states = runner.run(
                torch.tensor([self.tokens[start:end]], device=runner.loaded.device),
                self.cache,
                first=first,
                last=depth,
                base=self.base + start,
                hidden=hidden,
            )
            self.reached[start:end] = [depth] * (end - start)
            self.states[start:end] = list(states[0].unbind(0))

    def settle(self, runner: DepthRunner) -> Tensor:
        """Takes all tokens through the remaining layers in one pass; returns their states at depth L [Q, D]."""
        self.bring_to(max(self.reached), runner)
        self.bring_to(runner.num_layers, runner)
        return torch.stack([state for state in self.states if state is not None])

    def _groups_below(self, depth: int) -> Iterator[tuple[int, int, int]]:
        start = 0
        for reached, members in groupby(self.reached):
            end = start + len(list(members))
            if reached < depth:
                yield start, end, reached
            start = end
