"""Layer exits: a head and a confidence head as they were trained, and bound to the LM head's rows for drafting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from shared.ladder.chain_exit import ChainSteps, SteppedChain
from shared.ladder.confidence_head import ConfidenceHead
from shared.ladder.exit_head import ExitHead
from shared.ladder.native_chain import NativeChain, embedding_rows
from shared.ladder.proposers import exit_name
from shared.ladder.recorded_chain import MAX_RECORDED, RecordedChain
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.runner import Runner
from shared.ops.chains import Chains, ChainStart


@dataclass(frozen=True)
class LayerExit:
    """An exit at `depth` (0 <= depth < L): a head that proposes a token, and a confidence head that gives its
    probability of being right.

    `agreement`: share of held-out tokens on which the exit's token is the full model's greedy choice. The planner uses
    it to estimate an exit before running it.
    """

    depth: int
    head: ExitHead
    confidence: ConfidenceHead
    agreement: float = 0.0

    @property
    def name(self) -> str:
        return exit_name(self.depth)

    def held(self) -> list[Tensor]:
        """The tensors that it keeps in memory."""
        return [*self.head.parameters(), *self.confidence.parameters()]

    @property
    def layout(self) -> object:
        """Everything that the time of the exit depends on."""
        weights = (*self.head.named_parameters(), *self.confidence.named_parameters())
        return self.depth, *((name, tuple(w.shape)) for name, w in weights)


@dataclass(frozen=True, eq=False)
class Heads:
    """What the routers of one parent may have in common: heads of exits by depth, and `vocabulary` [Vd] int64, the
    tokens that exits may propose. Immutable."""

    by_depth: Mapping[int, ExitHead]
    vocabulary: Tensor


class ExitProposer(Protocol):
    """An exit as the drafter asks it, bound to a model on its device.

    `reads_states`: `starts` must have the states with which tokens enter the exit; they are then computed by the
    model's layers.
    """

    reads_states: bool

    def propose(self, starts: Sequence[ChainStart]) -> Chains:
        """At least one draft of each chain. All but the outputs is on the CPU; probabilities are float64."""

    def with_confidence(self, confidence: ConfidenceHead) -> Self:
        """The same head with another confidence head, on the same device. What both have in common is in memory
        once."""

    def held(self) -> list[Tensor | None]:
        """The tensors that it keeps in memory."""


def bind_exit(
    layer_exit: LayerExit, rows: Tensor, bias: Tensor | None, vocabulary: Tensor, runner: Runner
) -> ExitProposer:
    """The exit with the fastest way of drafting that it and the runner allow.

    `rows` [Vd, W] and `bias` [Vd]: the LM head's, of the draft vocabulary [Vd].
    Head and confidence head must be on their device.
    """
    head, confidence = layer_exit.head, layer_exit.confidence
    # Where states at depth 0 are rows of the embedding, no step of a chain needs the runner's host side.
    needs_passes = layer_exit.depth > 0 or not runner.embedding_is_direct
    embedding = None if needs_passes else embedding_rows(runner, len(rows))
    if embedding is not None:
        return NativeChain(head, confidence, rows, bias, vocabulary, embedding)
    # On a CPU without kernels, drafts in reserve cost too much.
    if needs_passes or (isinstance(runner, ContiguousRunner) and rows.device.type == "cpu"):
        return SteppedChain(ChainSteps(head, confidence, rows, bias), vocabulary)
    steps = ChainSteps(head, confidence, rows, bias, MAX_RECORDED)
    return RecordedChain(steps, vocabulary, head.hidden_size, runner)
