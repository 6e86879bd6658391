"""Exit heads in closed form: the linear maps from states to final states with the least squared error, solved from
`Moments`."""

import time

import torch
from torch import Tensor

from calibrator_service.calibration.states.moments import Moments
from shared.ladder.fused_head import NUM_STATES, FusedHead

# The ridge is this share of the mean square of an input, times inputs per position, within these bounds: measured on a
# model of 135 M parameters with 5,000 and 17,000 positions and on one of 1.5 B with 1,500 and 4,000
# (docs/decisions/038).
RIDGE_PER_LOAD, LEAST_RIDGE, MOST_RIDGE = 0.2, 0.003, 0.2
# Inputs of the ridge that `seconds_to_solve` solves, at most. Solving takes cubic time.
TRIED_INPUTS = 1024
# What `solve_head` takes, in times of its first ridge.
SOLVES_PER_HEAD = 1.3


@torch.no_grad()
def seconds_to_solve(hidden_size: int, device: torch.device) -> float:
    """About what `solve_head` takes on this machine."""
    num_inputs = (NUM_STATES + 1) * hidden_size
    tried = min(num_inputs, TRIED_INPUTS)
    second, targets = (torch.eye(tried, columns, device=device) for columns in (tried, tried // 4))
    start_s = time.perf_counter()
    float(solve_ridge(second, targets, 1.0)[0].sum())
    return SOLVES_PER_HEAD * (time.perf_counter() - start_s) * (num_inputs / tried) ** 3


@torch.no_grad()
def solve_head(moments: Moments, mlp_width: int) -> FusedHead:
    """The head whose matrices are the least-squares maps, in float32 on the moments' device.
    Its block adds nothing yet.

    The map of a chain's first step is from the settled states and the state entering; that of further steps from the
    head's output and the state entering. The second is solved for what the first one says, which is never as good as
    settled states. Needs at least one position.
    """
    size = moments.layout.hidden_size
    head = FusedHead(size, mlp_width).to(moments.second.device)
    num_first = (NUM_STATES + 1) * size
    second, targets = moments.second, moments.targets
    inputs, aims = second[:num_first, :num_first], targets[:num_first, :size]
    first, ridge = solve_ridge(inputs, aims, moments.count)
    # The sums over the output for t + 1 and the state entering at t + 2.
    # `inputs` @ `first` is what the equations of `first` say.
    seen = torch.empty(2 * size, 2 * size, device=second.device)
    seen[:size, :size] = first.T @ (aims - ridge * first)
    seen[:size, size:] = first.T @ second[:num_first, num_first:]
    seen[size:, :size] = seen[:size, size:].T
    seen[size:, size:] = second[num_first:, num_first:]
    aimed = torch.cat([first.T @ targets[:num_first, size:], targets[num_first:, size:]])
    # A chain goes on from outputs that are scaled to a root mean square of 1.
    # What is solved here knows their mean alone.
    mean_square = seen.diagonal()[:size].mean() / max(moments.count, 1.0)
    scale = torch.ones(2 * size, device=second.device)
    scale[:size] = mean_square.clamp_min(1e-12).rsqrt()
    further, _ = solve_ridge(seen * scale[:, None] * scale, aimed * scale[:, None], moments.count)
    head.fuse.copy_(torch.cat([first, further]).T)
    torch.nn.init.zeros_(head.down)
    # Logits of the size that the map's own outputs would have.
    head.gain.fill_(float(mean_square.sqrt()))
    return head


def solve_ridge(second: Tensor, targets: Tensor, count: float) -> tuple[Tensor, float]:
    """The matrix W [I, O] with the least squared error |x W - z|^2 plus the ridge, from the sums of x x' [I, I] and of
    x z' [I, O]; and the ridge: (sums + ridge) W = targets."""
    size = len(second)
    share = min(max(RIDGE_PER_LOAD * size / max(count, 1.0), LEAST_RIDGE), MOST_RIDGE)
    ridge = share * float(second.diagonal().double().mean()) + 1e-9
    damped = second.double()
    damped.diagonal().add_(ridge)
    factor = torch.linalg.cholesky(damped)
    return torch.cholesky_solve(targets.double(), factor).float(), ridge
