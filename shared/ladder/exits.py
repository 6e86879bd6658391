"""Layer exits: a head and a router as they were trained, and bound to the LM head's rows for drafting."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from shared.ladder.fused_exit import DraftRows, FusedExit, is_supported
from shared.ladder.fused_head import FusedHead, fused_output
from shared.ladder.head_rows import Projection, projection
from shared.ladder.heads import ExitHead
from shared.ladder.native_chain import NativeChain
from shared.ladder.routers import DepthRouter, scalar_features
from shared.ladder.rungs import exit_name


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


class ChainExit:
    """An exit whose head is a `FusedHead`. `project` maps the head's adapted outputs [N, D] to logits [N, Vd] of the draft vocabulary."""

    def __init__(self, head: FusedHead, router: DepthRouter, project: Projection) -> None:
        self._head, self._router, self._project = head, router, project
        self._matrices = [projection(matrix.detach(), None) for matrix in head.matrices]

    def output(self, states: Tensor, entering: Tensor) -> Tensor:
        """The outputs [N, D] of `step` alone, for tokens that another rung has drafted."""
        return fused_output(states, entering, self._head.norm, *self._matrices)

    def step(
        self, states: Tensor, entering: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One more token for each of N chains: indices into the draft vocabulary [N], probabilities [N] and outputs [N, D].

        `states` [N, 3, D] and `entering` [N, D]: as `FusedHead.forward` takes them. `places` [N] int64 >= 1: the place of the drafted
        token in its chain.
        """
        output = self.output(states, entering)
        adapted = self._head.adapted(output)
        logits = self._project(adapted)
        probabilities = self._router(adapted, scalar_features(logits, places))
        return logits.argmax(-1), probabilities, output


class PlainExit:
    """An exit of another form, in PyTorch: computes what `FusedExit` computes where neap's kernels do not run."""

    def __init__(self, head: ExitHead, router: DepthRouter, project: Projection) -> None:
        self._head, self._router, self._project = head, router, project

    def __call__(
        self, state: Tensor, deep_state: Tensor, distance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `FusedExit.__call__`."""
        adapted = self._head(state, deep_state, distance)
        logits = self._project(adapted)
        probabilities = self._router(adapted, scalar_features(logits, distance))
        return logits.argmax(-1), probabilities


BoundExit = NativeChain | ChainExit | FusedExit | PlainExit


def bind_exits(
    exits: Sequence[LayerExit],
    rows: Tensor,
    bias: Tensor | None,
    vocabulary: Tensor,
    embedding: Tensor | None,
) -> list[BoundExit]:
    """The exits with the LM head's rows [Vd, W] and biases [Vd] of the draft vocabulary [Vd]. Head and router must be on their device.

    `embedding`: see `embedding_rows`.
    """
    fuses = is_supported(rows.device, len(rows))
    # Made only if an exit needs them: each is a copy of the rows.
    drafts = cache(lambda: DraftRows.of(rows, bias))
    project = cache(lambda: projection(rows, bias))
    bound: list[BoundExit] = []
    for one in exits:
        if isinstance(one.head, FusedHead) and one.depth == 0 and embedding is not None:
            bound.append(NativeChain(one.head, one.router, rows, bias, vocabulary, embedding))
        elif isinstance(one.head, FusedHead):
            bound.append(ChainExit(one.head, one.router, project()))
        elif fuses:
            bound.append(FusedExit(one.head, one.router, drafts()))
        else:
            bound.append(PlainExit(one.head, one.router, project()))
    return bound
