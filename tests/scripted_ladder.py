"""A ladder whose drafts the test writes: right ones, wrong ones, at any depth."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shared.errors import RouterMismatch
from shared.ladder.joint_weights import DEFAULT_WEIGHTS
from shared.ladder.proposers import exit_name
from shared.ladder.tables import SequenceTables
from shared.model.loaded import LoadedModel
from shared.model.runner import Runner, captured_depths
from shared.ops.chains import Chains, ChainStart
from tests.scripted_tables import native_script

# Given all tokens so far (context and drafts), the next draft's (token, probability), or None.
Script = Callable[[list[int]], tuple[int, float] | None]


class ScriptedLadder:
    """Stands in for `Ladder` and `BoundLadder`. Table drafts follow `table`, layer exits at `depths` follow `exits`."""

    drafts_on_device = False
    heads = None

    def __init__(
        self,
        table: Script | None = None,
        exits: Script | None = None,
        depths: Sequence[int] = (),
        fingerprint: str | None = None,
        num_bytes: int = 1,
    ) -> None:
        self.num_bytes = num_bytes
        self.table = table
        self.exits = exits
        self.ladder = None
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

    def bind(self, runner: Runner, beside: object = ()) -> "ScriptedLadder":
        self.kept_depths = captured_depths(runner.num_layers) if self.depths else ()
        return self

    def exits_for(self, ladder: object) -> list[object]:
        return []

    def memory(self) -> dict[int, int]:
        """As if it took `num_bytes`."""
        return {id(self): self.num_bytes}

    def prepare(self) -> Iterator[None]:
        return iter(())

    def tables(self, *arguments: Any) -> "_ScriptedTables":
        self.context = []
        return _ScriptedTables(self, *arguments)

    def propose(self, index: int, starts: Sequence[ChainStart]) -> Chains:
        """Its outputs are the deep state of the last settled token, so that the whole chain sees it."""
        drafts, outputs = [], []
        for start in starts:
            assert start.entering is not None
            assert start.begin is not None
            deep = start.begin[-1] if start.begin.dim() == 2 else start.begin
            drafts.append(self._exit(index, start.entering[-1], deep, start.place + len(start.tokens)))
            outputs.append(deep)
        tokens, probabilities = zip(*drafts, strict=True)
        return Chains(
            torch.tensor(tokens)[:, None],
            torch.tensor(probabilities, dtype=torch.float64)[:, None],
            torch.ones(len(starts), dtype=torch.int64),
            torch.stack(outputs)[:, None],
        )

    def _exit(self, index: int, state: torch.Tensor, deep_state: torch.Tensor, place: int) -> tuple[int, float]:
        if self.table is None:
            self.drafted = self.drafted[: place - 1]
        self.seen_states.append((self.depths[index], state.clone(), deep_state.clone(), place))
        assert self.exits is not None
        token, probability = self.exits(self.context + self.drafted) or (0, 0.0)
        if self.table is None:
            self.drafted = [*self.drafted, token]
        return token, probability


class _ScriptedTables(SequenceTables):
    """The tables of the one sequence that drafts with the ladder."""

    def __init__(self, ladder: ScriptedLadder, *arguments: Any) -> None:
        self._ladder = ladder
        super().__init__(*arguments, script=native_script(self._propose) if ladder.table else None)

    def append(self, tokens: Sequence[int]) -> None:
        super().append(tokens)
        self._ladder.context += tokens

    def _propose(self, drafted: Sequence[int]) -> tuple[int, float] | None:
        ladder = self._ladder
        ladder.drafted = list(drafted)
        assert ladder.table is not None
        return ladder.table(ladder.context + ladder.drafted)
