"""A ladder whose drafts the test writes: right ones, wrong ones, at any depth."""

from collections.abc import Callable, Iterator, Sequence

import torch

from shared.errors import RouterMismatch
from shared.ladder.joint_weights import DEFAULT_WEIGHTS
from shared.ladder.native_chain import HeadDraft
from shared.ladder.proposers import Draft, exit_name
from shared.model.loaded import LoadedModel
from shared.model.runner import Runner, captured_depths
from shared.ops.chains import ChainStart

# Given all tokens so far (context and drafts), the next draft's (token, probability), or None.
Script = Callable[[list[int]], tuple[int, float] | None]


class ScriptedLadder:
    """Stands in for `Ladder` and `BoundLadder`. Table drafts follow `table`, layer exits at `depths` follow `exits`."""

    def __init__(
        self,
        table: Script | None = None,
        exits: Script | None = None,
        depths: Sequence[int] = (),
        fingerprint: str | None = None,
    ) -> None:
        self.table = table
        self.exits = exits
        self.depths = tuple(depths)
        self.layout = self.depths
        self.state_depths = self.depths
        self.kept_depths: tuple[int, ...] = ()
        self.agreements = (1.0,) * len(self.depths)
        self.names = tuple(map(exit_name, self.depths))
        self.joint_weights = DEFAULT_WEIGHTS
        self.fingerprint = fingerprint
        self.seen_states: list[tuple[int, torch.Tensor, torch.Tensor, int]] = []
        self.context: list[int] = []
        self.drafted: list[int] = []

    def check_model(self, loaded: LoadedModel) -> None:
        if self.fingerprint is not None and self.fingerprint != loaded.fingerprint:
            raise RouterMismatch("another model's")

    def bind(self, runner: Runner) -> "ScriptedLadder":
        self.kept_depths = captured_depths(runner.num_layers) if self.depths else ()
        return self

    def prepare(self) -> Iterator[None]:
        return iter(())

    def proposers(self, learned: object = None) -> tuple["_Table"]:
        self.context = []
        return (_Table(self),)

    def propose(self, index: int, starts: Sequence[ChainStart]) -> list[list[HeadDraft]]:
        """Its outputs are the deep state of the last settled token, so that the whole chain sees it."""
        found = []
        for start in starts:
            begin = start.begin
            assert start.entering is not None
            assert begin is not None
            deep = begin[-1] if begin.dim() == 2 else begin
            draft = self._exit(index, start.entering[-1], deep, start.place + len(start.tokens))
            found.append([HeadDraft(draft, deep)])
        return found

    def _exit(self, index: int, state: torch.Tensor, deep_state: torch.Tensor, place: int) -> Draft:
        depth = self.depths[index]
        if self.table is None:
            self.drafted = self.drafted[: place - 1]
        self.seen_states.append((depth, state.clone(), deep_state.clone(), place))
        assert self.exits is not None
        proposal = self.exits(self.context + self.drafted) or (0, 0.0)
        draft = Draft(*proposal, proposer=f"depth-{depth}", depth=depth)
        if self.table is None:
            self.drafted = [*self.drafted, draft.token]
        return draft


class _Table:
    """The table of the one sequence that drafts with the ladder."""

    def __init__(self, ladder: ScriptedLadder) -> None:
        self._ladder = ladder

    def append(self, tokens: Sequence[int]) -> None:
        self._ladder.context += tokens

    def propose(self, drafted: Sequence[int] = ()) -> list[Draft]:
        ladder = self._ladder
        ladder.drafted = list(drafted)
        proposal = ladder.table(ladder.context + ladder.drafted) if ladder.table else None
        return [Draft(*proposal, proposer="prompt-lookup", depth=0)] if proposal else []
