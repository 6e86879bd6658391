"""The tokens that a deep pass settles together, and how deep each of them has been."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.ladder.rungs import Draft
from shared.model.cache import SlotCache
from shared.model.packed import Segment
from shared.model.runner import DepthRunner


@dataclass
class Chain:
    """Tokens of one sequence from position `base` on: its last final token and what was drafted after it, or a piece of its
    prompt.

    The first `num_final` drafts are final already (policy relaxed). `reached[i]` is the depth that the chain's i-th token has been
    to, `states[i]` [D] its state there, None at depth 0. The counts are of what ran for these tokens.
    """

    base: int
    tokens: list[int]
    cache: SlotCache
    drafts: list[Draft] = field(default_factory=list)
    # As trusted for this request; 1 for what is final.
    probabilities: list[float] = field(default_factory=list)
    num_final: int = 0
    reached: list[int] = field(default_factory=list)
    states: list[Tensor | None] = field(default_factory=list)
    num_layer_executions: int = 0
    num_token_layers: int = 0

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

    def below(self, depth: int) -> tuple[int, int]:
        """(start, first): the tokens from `start` on have not been to `depth` yet; all of them have been to `first`.

        Drafting takes later tokens no deeper than earlier ones, and all that go deeper go together, hence one group.
        """
        start = next((i for i, d in enumerate(self.reached) if d < depth), len(self.tokens))
        firsts = set(self.reached[start:])
        assert len(firsts) <= 1
        return start, firsts.pop() if firsts else depth


def bring_to(depth: int, chains: Sequence[Chain], runner: DepthRunner) -> None:
    """Takes every token that has not been to `depth` there; chains of several sequences only where the runner can pack.

    Tokens at different depths first go to the deepest of these, so each layer runs once for all.
    """
    depths = {d for chain in chains for d in chain.reached if 0 < d < depth}
    for last in (*sorted(depths), depth):
        by_first: dict[int, list[tuple[Chain, int]]] = {}
        for chain in chains:
            start, first = chain.below(last)
            if first < last:
                by_first.setdefault(first, []).append((chain, start))
        for first, members in by_first.items():
            _run(members, first, last, runner)


def settle(chains: Sequence[Chain], runner: DepthRunner) -> list[Tensor]:
    """Takes all tokens through the remaining layers; per chain their states at depth L [Q, D]."""
    bring_to(runner.num_layers, chains, runner)
    return [torch.stack([s for s in chain.states if s is not None]) for chain in chains]


def _run(members: list[tuple[Chain, int]], first: int, last: int, runner: DepthRunner) -> None:
    tokens = [token for chain, start in members for token in chain.tokens[start:]]
    ids = runner.ids(tokens)
    hidden = None
    if first:
        entering = [s for chain, start in members for s in chain.states[start:] if s is not None]
        hidden = torch.stack(entering)[None]
    if len(members) == 1:
        chain, start = members[0]
        states = runner.run(
            ids, chain.cache, first=first, last=last, base=chain.base + start, hidden=hidden
        )
    else:
        segments = [
            Segment(chain.cache, chain.base + start, len(chain.tokens) - start)
            for chain, start in members
        ]
        states = runner.run_packed(ids, segments, first=first, last=last, hidden=hidden)
    rows = iter(states[0].unbind(0))
    for chain, start in members:
        count = len(chain.tokens) - start
        chain.reached[start:] = [last] * count
        chain.states[start:] = [next(rows) for _ in range(count)]
        chain.num_layer_executions += last - first
        chain.num_token_layers += count * (last - first)
