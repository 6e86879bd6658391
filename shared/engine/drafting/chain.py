"""The tokens of one sequence that share a deep pass, and the depth that each of them has reached."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.ladder.rungs import Draft
from shared.model.cache import KVCache
from shared.model.ragged import RaggedSequence
from shared.model.runner import Runner, Taps


@dataclass(frozen=True)
class Leaf:
    """Another draft in the place of `chain.drafts[place]`, with no drafts after it. `probability`: that it is right, and the chain's
    draft wrong, given that all drafts before them are right."""

    place: int
    draft: Draft
    probability: float


@dataclass
class Chain:
    """Tokens of one sequence from position `base` on: its last final token and the drafts after it, or a piece of its prompt.

    `tokens`, and all that is kept per token, ends with the `leaves`, which are chosen from `possible_leaves` when the chain itself is
    complete. The first `num_final` drafts are final already (policy relaxed). The chain's i-th token has been through `reached[i]` layers;
    `states[i]` [D] is its state there, None at depth 0. `kept[depth]` are the states [D] of the first tokens at a depth that they
    have reached, for the depths that are its keys. The counts are of the layers that ran for these tokens. `read_length` as in
    `RaggedSequence`.
    """

    base: int
    tokens: list[int]
    cache: KVCache
    drafts: list[Draft] = field(default_factory=list)
    # Adjusted for this request; 1 for drafts that are final.
    probabilities: list[float] = field(default_factory=list)
    num_final: int = 0
    reached: list[int] = field(default_factory=list)
    states: list[Tensor | None] = field(default_factory=list)
    kept: dict[int, list[Tensor]] = field(default_factory=dict)
    possible_leaves: list[Leaf] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    num_layer_executions: int = 0
    num_token_layers: int = 0
    read_length: int | None = None

    def __post_init__(self) -> None:
        self.reached, self.states = [0] * len(self.tokens), [None] * len(self.tokens)

    def append(self, draft: Draft, probability: float) -> None:
        self.drafts.append(draft)
        self.probabilities.append(probability)
        self.tokens.append(draft.token)
        self.reached.append(0)
        self.states.append(None)

    @property
    def chances_of_leaves(self) -> list[tuple[int, float]]:
        """Place and probability of each possible leaf. There are none if drafting has taken tokens through layers: leaves would be at another
        depth."""
        if any(self.reached):
            return []
        return [(leaf.place, leaf.probability) for leaf in self.possible_leaves]

    def leaf_after(self, num_drafts: int, token: int) -> int | None:
        """Which leaf is `token` in the place of the draft after the first `num_drafts`. None if there is none."""
        found = (leaf.place == num_drafts and leaf.draft.token == token for leaf in self.leaves)
        return next((number for number, is_it in enumerate(found) if is_it), None)

    def move_of_leaf(self, number: int) -> tuple[KVCache, int, int]:
        """The move of a leaf's keys and values to its position: see `Runner.move`."""
        kept_at = self.base + self.index_of_leaf(number)
        return self.cache, kept_at, self.base + 1 + self.leaves[number].place

    def index_of_leaf(self, number: int) -> int:
        """Its index in `tokens`, and the distance from `base` of where it is kept."""
        return 1 + len(self.drafts) + number

    def part_of_pass(self, part: slice) -> RaggedSequence:
        """A range of the tokens as part of a pass."""
        leaves = [self.base + 1 + leaf.place for leaf in self.leaves]
        return RaggedSequence(
            self.cache,
            self.base + part.start,
            part.stop - part.start,
            tuple(leaves),
            self.read_length,
        )

    def prune(self, num_drafts: int, leaves: Sequence[int] = ()) -> None:
        """Keeps the first `num_drafts` drafts and these of the `possible_leaves`, as far as the cache has room for them. The keys and
        values of other drafts are overwritten by later tokens at their positions."""
        del self.drafts[num_drafts:], self.probabilities[num_drafts:]
        del self.tokens[num_drafts + 1 :], self.reached[num_drafts + 1 :]
        del self.states[num_drafts + 1 :]
        for states in self.kept.values():
            del states[num_drafts + 1 :]
        assert not leaves or not any(self.reached)
        room = max(self.cache.capacity - self.base - len(self.tokens), 0)
        self.leaves = [self.possible_leaves[number] for number in leaves[:room]]
        self.tokens += [leaf.draft.token for leaf in self.leaves]
        self.reached += [0] * len(self.leaves)
        self.states += [None] * len(self.leaves)

    def tokens_below(self, depth: int) -> tuple[slice, int]:
        """(tokens, first): the tokens that have not reached `depth`. All of them have reached depth `first`.

        They are one group, because drafting takes later tokens no deeper than earlier ones and takes tokens deeper together.
        """
        end = len(self.tokens)
        start = next((i for i, d in enumerate(self.reached) if d < depth), end)
        firsts = set(self.reached[start:end])
        assert len(firsts) <= 1
        return slice(start, end), firsts.pop() if firsts else depth


# A chain and a range of its tokens.
_Part = tuple[Chain, slice]


def advance_to(depth: int, chains: Sequence[Chain], runner: Runner) -> Tensor | None:
    """Takes all tokens that have not reached `depth` there. There may be several chains only if the runner supports ragged batches.

    Tokens at different depths are first brought to the deepest of these depths, so that each layer runs once for all of them.
    Returns the states [T, D] of the last pass, token after token; None if nothing had to run.
    """
    states = None
    depths = {d for chain in chains for d in chain.reached if 0 < d < depth}
    for last in (*sorted(depths), depth):
        by_first: dict[int, list[_Part]] = {}
        for chain in chains:
            part, first = chain.tokens_below(last)
            if first < last:
                by_first.setdefault(first, []).append((chain, part))
        for first, parts in by_first.items():
            states = _run(parts, first, last, runner)
    return states


def settle(chains: Sequence[Chain], runner: Runner) -> Tensor:
    """Takes all tokens through the remaining layers. Returns their states at depth L [T, D], chain after chain.

    No token may have reached depth L before. `advance_to` first brings all to the depth of the deepest, so the last pass has all of them.
    """
    states = advance_to(runner.num_layers, chains, runner)
    assert states is not None
    assert len(states) == sum(len(chain.tokens) for chain in chains)
    return states


def _run(parts: Sequence[_Part], first: int, last: int, runner: Runner) -> Tensor:
    ids = runner.ids([token for chain, part in parts for token in chain.tokens[part]])
    hidden = None
    if first:
        entering = [s for chain, part in parts for s in chain.states[part] if s is not None]
        hidden = torch.stack(entering)[None]
    kept = {depth for chain, _ in parts for depth in chain.kept}
    taps: Taps | None = {} if any(first < depth < last for depth in kept) else None
    if len(parts) == 1 and not parts[0][0].leaves:
        [(chain, part)] = parts
        base = chain.base + part.start
        states = runner.run(
            ids,
            chain.cache,
            first=first,
            last=last,
            base=base,
            hidden=hidden,
            taps=taps,
            read_length=chain.read_length,
        )[0]
    else:
        sequences = [chain.part_of_pass(part) for chain, part in parts]
        states = runner.run_ragged(
            ids, sequences, first=first, last=last, hidden=hidden, taps=taps
        )[0]
    counts = [part.stop - part.start for _, part in parts]
    _keep(parts, counts, {**(taps or {}), last: states[None]})
    for (chain, part), count, own in zip(
        parts, counts, states.split_with_sizes(counts), strict=True
    ):
        chain.reached[part] = [last] * count
        chain.states[part] = own.unbind(0)
        chain.num_layer_executions += last - first
        chain.num_token_layers += count * (last - first)
    return states


def _keep(parts: Sequence[_Part], counts: Sequence[int], passed: Taps) -> None:
    """Adds what a pass has shown to what the chains keep. `passed`: depth -> states [1, T, D] of all parts."""
    for depth, states in passed.items():
        for (chain, _), own in zip(parts, states[0].split_with_sizes(list(counts)), strict=True):
            if depth in chain.kept:
                chain.kept[depth] += own.unbind(0)
