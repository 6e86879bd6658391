"""Layer exits: a head and a router as they were trained, and bound to the LM head's rows for drafting."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from shared.ladder.chain_exit import ChainExit, plain_draws
from shared.ladder.fused_exit import DraftRows, FusedExit, is_supported
from shared.ladder.fused_head import FusedHead
from shared.ladder.head_rows import Projection, projection
from shared.ladder.heads import ExitHead
from shared.ladder.native_chain import NativeChain, embedding_rows
from shared.ladder.recorded_chain import DRAFTS_PER_PLACE, MAX_CHAINS, RecordedChain
from shared.ladder.routers import DepthRouter
from shared.ladder.rungs import exit_name
from shared.model.contiguous_runner import ContiguousRunner
from shared.model.runner import Runner


@dataclass(frozen=True)
class LayerExit:
    """An exit at `depth` (0 <= depth < L): a head that proposes a token, and a router that gives its probability of being right.

    `agreement`: share of held-out tokens on which the exit's token is the full model's greedy choice. The planner uses it to
    estimate an exit before running it.
    """

    depth: int
    head: ExitHead | FusedHead
    router: DepthRouter
    agreement: float = 0.0

    @property
    def name(self) -> str:
        return exit_name(self.depth)

    @property
    def layout(self) -> object:
        """Everything that the time of the exit depends on."""
        weights = (*self.head.named_parameters(), *self.router.named_parameters())
        return self.depth, self.head.form, *((name, tuple(w.shape)) for name, w in weights)


class PlainExit:
    """An exit of another form, in PyTorch: computes what `FusedExit` computes where neap's kernels do not run."""

    def __init__(self, head: ExitHead, router: DepthRouter, project: Projection) -> None:
        self._head, self._draws = head, plain_draws(router, project)

    def __call__(
        self, state: Tensor, deep_state: Tensor, distance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `FusedExit.__call__`."""
        indices, probabilities = self._draws(self._head(state, deep_state, distance), distance)
        return indices[:, 0], probabilities[:, 0]


# Those that draft whole chains in one call.
WholeChains = NativeChain | RecordedChain
BoundExit = WholeChains | ChainExit | FusedExit | PlainExit


def bind_exits(
    exits: Sequence[LayerExit],
    rows: Tensor,
    bias: Tensor | None,
    vocabulary: Tensor,
    runner: Runner,
) -> list[BoundExit]:
    """The exits with the LM head's rows [Vd, W] and biases [Vd] of the draft vocabulary [Vd]. Head and router must be on their device."""
    fuses = is_supported(rows.device, len(rows))
    # Made only if an exit needs them: each is a copy of the rows.
    drafts = cache(lambda: DraftRows.of(rows, bias))
    project = cache(lambda: projection(rows, bias))
    bound: list[BoundExit] = []
    for one in exits:
        if isinstance(one.head, FusedHead):
            bound.append(_bind_chain(one, one.head, rows, bias, vocabulary, runner))
        elif fuses:
            bound.append(FusedExit(one.head, one.router, drafts()))
        else:
            bound.append(PlainExit(one.head, one.router, project()))
    return bound


def _bind_chain(
    one: LayerExit,
    head: FusedHead,
    rows: Tensor,
    bias: Tensor | None,
    vocabulary: Tensor,
    runner: Runner,
) -> BoundExit:
    """The exit with the fastest way of drafting that it and the runner allow."""
    # Where states at depth 0 are rows of the embedding, no step of a chain needs the runner's host side.
    if one.depth or not runner.embedding_is_direct:
        return ChainExit(head, one.router, rows, bias)
    embedding = embedding_rows(runner, len(rows))
    if embedding is not None:
        return NativeChain(head, one.router, rows, bias, vocabulary, embedding)
    if isinstance(runner, ContiguousRunner) and rows.device.type == "cpu":
        return ChainExit(
            head, one.router, rows, bias
        )  # without kernels, drafts in reserve cost too much
    step = ChainExit(head, one.router, rows, bias, DRAFTS_PER_PLACE, MAX_CHAINS)
    return RecordedChain(step, vocabulary, head.hidden_size, runner)
