"""The exit head: the full model's states at three depths and a token's embedding, through one matrix and one gated
block.

In a chain of drafts the head's own output takes the place of the states, so a chain depends on the settled prefix and
on the chain's tokens alone. It is solved and trained on such chains (see `calibrator_service.calibration.training`).
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.ladder.head_rows import Projection

EPSILON = 1e-6


def unit(state: Tensor) -> Tensor:
    """States [..., D] scaled to a root mean square of 1, in float32.
    Without it, depths differ by orders of magnitude."""
    state = state.float()
    return state * torch.rsqrt(state.square().mean(-1, keepdim=True) + EPSILON)


NUM_STATES = 3
# What a step begins with: the settled states, and the head's own output. One of both is zero.
NUM_SLOTS = NUM_STATES + 1
# Initial logits are this much smaller than with the final norm's gain.
# At full size the first hundreds of steps only shrink them.
INITIAL_GAIN = 0.3


class ExitHead(nn.Module):
    """States after a third, two thirds and all of the layers of the last settled token, and the state that the newest
    token enters the exit with: its embedding at depth 0, its state after d layers at depth d.

    With u(x) = `unit(x)`, the first step of a chain: joined = fuse [D, 4D] @ (u(low), u(middle), u(last), u(entering)).
    A further step: joined = next [D, 2D] @ (output of the step before, u(entering)). Then n = u(joined) * norm [D];
    output = u(joined + down [D, M] @ (silu(gate [M, D] @ n) * (up [M, D] @ n))). The LM head's input is output * gain
    [D]. The parameter `fuse` [D, 6D] holds fuse and next, side by side. Only for models whose LM head reads states of
    width D, because the output stands for states of width D.
    """

    def __init__(self, hidden_size: int, mlp_width: int, gain: Tensor | None = None) -> None:
        """`gain` [D]: the final norm's gain; ones if it is None or of another shape."""
        super().__init__()
        self.hidden_size = hidden_size
        self.mlp_width = mlp_width
        if gain is None or gain.shape != (hidden_size,):
            gain = torch.ones(hidden_size)
        num_inputs = (NUM_STATES + 1) * hidden_size
        self.fuse = nn.Parameter(torch.randn(hidden_size, 6 * hidden_size) * num_inputs**-0.5)
        self.norm = nn.Parameter(torch.ones(hidden_size))
        self.gate = nn.Parameter(torch.randn(mlp_width, hidden_size) * hidden_size**-0.5)
        self.up = nn.Parameter(torch.randn(mlp_width, hidden_size) * hidden_size**-0.5)
        self.down = nn.Parameter(torch.randn(hidden_size, mlp_width) * mlp_width**-0.5 * 0.5)
        self.gain = nn.Parameter(gain.detach().float() * INITIAL_GAIN)

    def forward(self, states: Tensor, entering: Tensor) -> Tensor:
        """The output [..., D], float32, with a root mean square of 1.

        `states`: of the last settled token [..., NUM_STATES, D], or `in_slots` of these or `chained` of the output for
        the token before, both [..., NUM_SLOTS, D]. `entering` [..., D].
        """
        matmuls = (partial(F.linear, weight=weight) for weight in self.matrices)
        return head_output(states, entering, self.norm, *matmuls)

    @property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """fuse [D, 6D], gate, up and down."""
        return self.fuse, self.gate, self.up, self.down

    @property
    def steps(self) -> tuple[Tensor, Tensor]:
        """fuse [D, 4D] of a chain's first step, and next [D, 2D] of its further steps."""
        first, further = self.fuse.detach().split([4 * self.hidden_size, 2 * self.hidden_size], 1)
        return first, further

    def adapted(self, output: Tensor) -> Tensor:
        """The LM head's input [..., D] of an output [..., D]."""
        return output * self.gain


def head_output(
    states: Tensor, entering: Tensor, norm: Tensor, fuse: Projection, gate: Projection, up: Projection, down: Projection
) -> Tensor:
    """`ExitHead.forward`, with each matmul by a matrix as a function."""
    slots, newest = unit(in_slots(states)), unit(entering)
    settled, previous = slots[..., :NUM_STATES, :], slots[..., NUM_STATES, :]
    is_further = (previous != 0).any(-1, keepdim=True)
    nothing = torch.zeros_like(newest)
    first = torch.where(is_further, nothing, newest)
    further = torch.where(is_further, newest, nothing)
    joined = fuse(torch.cat([settled.flatten(-2), first, previous, further], -1))
    return block_output(joined, norm, gate, up, down)


def further_output(
    previous: Tensor,
    entering: Tensor,
    norm: Tensor,
    further: Projection,
    gate: Projection,
    up: Projection,
    down: Projection,
) -> Tensor:
    """`head_output` where each state is `chained` of an output, `previous` [..., D]. `further`: the matmul by next."""
    joined = further(torch.cat([unit(previous), unit(entering)], -1))
    return block_output(joined, norm, gate, up, down)


def block_output(joined: Tensor, norm: Tensor, gate: Projection, up: Projection, down: Projection) -> Tensor:
    """The head's output of what its first matrix makes, both [..., D]."""
    normed = unit(joined) * norm
    return unit(joined + down(F.silu(gate(normed)) * up(normed)))


def in_slots(states: Tensor) -> Tensor:
    """Settled states [..., NUM_STATES, D] with an empty slot for the output: [..., NUM_SLOTS, D], which stays as it
    is."""
    return F.pad(states, (0, 0, 0, NUM_SLOTS - states.shape[-2]))


def chained(output: Tensor) -> Tensor:
    """The output [..., D] in the place of the states, for the next token of the chain: [..., NUM_SLOTS, D]."""
    return F.pad(output[..., None, :], (0, 0, NUM_STATES, 0))


def default_mlp_width(hidden_size: int) -> int:
    """Width of the block's MLP: 8/3 of the hidden size, as in most decoder layers.

    In steps of 32: torch's SiLU rounds the rest of a tensor beyond such a step otherwise, and then a draft's
    probability depends on the rows beside it.
    """
    return max(32, 8 * hidden_size // 3 // 32 * 32)
