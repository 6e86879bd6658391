"""Layer exits: a head and a router as they were trained, and bound to the LM head's rows for drafting."""

from dataclasses import dataclass

from torch import Tensor

from shared.ladder.chain_exit import ChainExit
from shared.ladder.fused_head import FusedHead
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
    head: FusedHead
    router: DepthRouter
    agreement: float = 0.0

    @property
    def name(self) -> str:
        return exit_name(self.depth)

    @property
    def layout(self) -> object:
        """Everything that the time of the exit depends on."""
        weights = (*self.head.named_parameters(), *self.router.named_parameters())
        return self.depth, *((name, tuple(w.shape)) for name, w in weights)


# Those that draft whole chains in one call.
WholeChains = NativeChain | RecordedChain
BoundExit = WholeChains | ChainExit


def bind_exit(
    one: LayerExit,
    rows: Tensor,
    bias: Tensor | None,
    vocabulary: Tensor,
    runner: Runner,
) -> BoundExit:
    """The exit with the fastest way of drafting that it and the runner allow.

    `rows` [Vd, W] and `bias` [Vd]: the LM head's, of the draft vocabulary [Vd]. Head and router must be on their device.
    """
    head = one.head
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
