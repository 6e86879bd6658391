"""Exit heads: predict the full model's next token from the state at depth d."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.ladder.forms import HeadForm

# Distances to the last settled token that a head distinguishes; longer ones count as the longest.
NUM_OFFSETS = 4
EPSILON = 1e-6


def unit(state: Tensor) -> Tensor:
    """States [..., D] scaled to a root mean square of 1, in float32. Without it, depths differ by orders of magnitude."""
    state = state.float()
    return state * torch.rsqrt(state.square().mean(-1, keepdim=True) + EPSILON)


class ExitHead(nn.Module):
    """Combines the state at depth d with the full model's state of the last settled token, as EAGLE does (2401.15077).

    `affine`: a tuned lens (2303.08112) over both states. `gated`: both states scaled per channel, plus a low-rank SwiGLU.
    The result is normalised with the head's own gain, initialised from the final norm's, and is the input of the LM head's rows.
    The model's own norm is not used because it may run on a kernel without a gradient.
    """

    def __init__(
        self,
        form: HeadForm,
        hidden_size: int,
        head_width: int,
        rank: int,
        gain: Tensor | None = None,
    ) -> None:
        """`head_width`: width of the LM head's input, D in nearly every family. `rank`: used by `gated` only.

        `gain` [head_width]: initial gain; ones if it is None or of another shape.
        """
        super().__init__()
        self.form: HeadForm = form
        self.hidden_size, self.head_width, self.rank = hidden_size, head_width, rank
        fits = gain is not None and gain.shape == (head_width,)
        self.gain = nn.Parameter(
            gain.detach().float().clone() if fits and gain is not None else torch.ones(head_width)
        )
        inner = head_width if form == "affine" else 2 * rank
        self.offset = nn.Parameter(torch.zeros(NUM_OFFSETS, inner))
        self.mix = nn.Parameter(torch.randn(inner, 2 * hidden_size) * (2 * hidden_size) ** -0.5)
        if form == "affine":
            with torch.no_grad():
                self.mix.mul_(0.1)
                if head_width == hidden_size:
                    self.mix.add_(
                        torch.cat([torch.eye(hidden_size), torch.eye(hidden_size)], 1) * 0.5
                    )
        else:
            self.out = nn.Parameter(torch.randn(head_width, rank) * rank**-0.5 * 0.5)
            self.scale = nn.Parameter(torch.full((2, head_width), 0.5))

    def forward(self, state: Tensor, deep_state: Tensor, distance: Tensor) -> Tensor:
        """The adapted state [..., head_width], float32 and normalised: the LM head's input.

        `state` [..., D]: at depth d. `deep_state` [..., D]: at depth L, of the last settled token. `distance` [...] int64 >= 1:
        how many positions that token lies back (1: it is the token before).
        """
        own, deep = unit(state), unit(deep_state)
        inner = (
            F.linear(torch.cat([own, deep], -1), self.mix)
            + self.offset[distance.clamp(1, NUM_OFFSETS) - 1]
        )
        if self.form == "affine":
            return unit(inner) * self.gain
        gate, value = inner.chunk(2, -1)
        adapted = F.linear(F.silu(gate) * value, self.out)
        if self.head_width == self.hidden_size:
            adapted = adapted + self.scale[0] * own + self.scale[1] * deep
        return unit(adapted) * self.gain


def default_rank(hidden_size: int) -> int:
    """Rank of a gated head: half the hidden size, in steps of 16, at most 512."""
    return max(16, min(512, hidden_size // 32 * 16))
