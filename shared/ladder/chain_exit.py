"""An exit that continues chains of drafts on its own output, one draft per call."""

import torch.nn.functional as F
from torch import Tensor

from shared import ops
from shared.ladder.draws import Draws, KernelDraws, is_supported, kernel_weight, plain_draws
from shared.ladder.fused_head import FusedHead, fused_output
from shared.ladder.head_rows import Projection, projection
from shared.ladder.routers import DepthRouter


class ChainExit:
    """An exit whose head is a `FusedHead`. The block's matrices are held in 16 bits.

    `rows` [Vd, W] and `bias` [Vd] are the LM head's of the draft vocabulary. `num_drafts`: K, the drafts of each position.
    `num_chains`: the most chains of a call that is recorded.
    """

    def __init__(
        self,
        head: FusedHead,
        router: DepthRouter,
        rows: Tensor,
        bias: Tensor | None,
        num_drafts: int = 2,
        num_chains: int = 1,
    ) -> None:
        self._head = head
        self._draws: Draws
        if is_supported(rows.device, len(rows)):
            self._draws = KernelDraws(router, rows, bias, num_drafts, num_chains)
        else:
            self._draws = plain_draws(router, projection(rows, bias), num_drafts)
        self._matrices = [projection_in_16_bits(matrix) for matrix in head.matrices]

    def output(self, states: Tensor, entering: Tensor) -> Tensor:
        """The outputs [N, D] of `step` alone, for tokens that another rung has drafted."""
        return fused_output(states, entering, self._head.norm, *self._matrices)

    def step(
        self, states: Tensor, entering: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One more token for each of N chains: indices into the draft vocabulary [N, K], probabilities [N, K] and outputs [N, D].

        `states` [N, 3, D] and `entering` [N, D]: as `FusedHead.forward` takes them. `places` [N] int64 >= 1: the place of the drafted
        token in its chain.
        """
        output = self.output(states, entering)
        return *self._draws(self._head.adapted(output), places), output


def projection_in_16_bits(matrix: Tensor) -> Projection:
    """A product by `matrix` [M, K] in the format of `kernel_weight`, with float32 results."""
    weight = kernel_weight(matrix)
    if weight.device.type == "cpu" and ops.is_available():
        packed, size = ops.pack_linear(weight), len(weight)
        return lambda states: ops.packed_linear(states, packed, size, None)
    return lambda states: F.linear(states.to(weight.dtype), weight).float()
