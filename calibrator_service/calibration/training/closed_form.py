"""Exit heads in closed form: the linear maps from states to final states with the least squared error, solved from
`Moments`. Few positions are solved in the dual form, with one equation per position instead of one per input."""

import time

import torch
from torch import Tensor

from calibrator_service.calibration.states.moments import KEPT_PER_WIDTH, Moments
from shared.ladder.exit_head import NUM_STATES, ExitHead

# The ridge is this share of the mean square of an input, times inputs per position, within these bounds: measured on a
# model of 135 M parameters with 5,000 and 17,000 positions and on one of 1.5 B with 1,500 and 4,000
# (docs/decisions/010).
RIDGE_PER_LOAD, LEAST_RIDGE, MOST_RIDGE = 0.2, 0.003, 0.2
# Inputs of the ridge that `seconds_to_solve` solves, at most. Solving takes cubic time.
TRIED_INPUTS = 1024
# What `solve_head` takes, in times of its first ridge.
SOLVES_PER_HEAD = 1.3


@torch.no_grad()
def seconds_to_solve(hidden_size: int, device: torch.device) -> float:
    """About what `solve_head` takes on this machine from sums: see `share_to_solve`."""
    num_inputs = (NUM_STATES + 1) * hidden_size
    tried = min(num_inputs, TRIED_INPUTS)
    second, targets = (torch.eye(tried, columns, device=device) for columns in (tried, tried // 4))
    start_s = time.perf_counter()
    float(solve_ridge(second, targets, 1.0)[0].sum())
    return SOLVES_PER_HEAD * (time.perf_counter() - start_s) * (num_inputs / tried) ** 3


def share_to_solve(hidden_size: int, num_positions: float) -> float:
    """Of `seconds_to_solve`, what so few positions take: by the products of `_from_positions` and `_from_sums`."""
    if num_positions > KEPT_PER_WIDTH * (NUM_STATES + 2) * hidden_size:
        return 1.0
    ratio = num_positions / hidden_size
    return min(1.0, ratio / 4 + ratio**2 / 8)


@torch.no_grad()
def solve_head(moments: Moments, mlp_width: int) -> ExitHead:
    """The head whose matrices are the least-squares maps, in float32 on the moments' device.
    Its block adds nothing yet.

    The map of a chain's first step is from the settled states and the state entering; that of further steps from the
    head's output and the state entering. The second is solved for what the first one says, which is never as good as
    settled states. Needs at least one position.
    """
    head = ExitHead(moments.layout.hidden_size, mlp_width).to(moments.device)
    kept = moments.kept
    first, further, mean_square = _from_sums(moments) if kept is None else _from_positions(*kept)
    head.fuse.copy_(torch.cat([first, further]).T)
    torch.nn.init.zeros_(head.down)
    # Logits of the size that the map's own outputs would have.
    head.gain.fill_(float(mean_square.sqrt()))
    return head


def _from_sums(moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """The maps of a chain's first step [4D, D] and of further steps [2D, D], and the mean square of the first one's
    outputs."""
    size = moments.layout.hidden_size
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
    mean_square = seen.diagonal()[:size].mean() / max(moments.count, 1.0)
    scale = _scale(mean_square, size)
    further, _ = solve_ridge(seen * scale[:, None] * scale, aimed * scale[:, None], moments.count)
    return first, further, mean_square


def _from_positions(states: Tensor, finals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_from_sums`, from the positions themselves: states [N, 5D], finals [N, 2D]."""
    size = finals.shape[1] // 2
    inputs, entering = states.split([(NUM_STATES + 1) * size, size], 1)
    first = solve_ridge_of(inputs, finals[:, :size])
    outputs = inputs @ first
    mean_square = outputs.square().sum() / max(outputs.numel(), 1)
    seen = torch.cat([outputs, entering], 1) * _scale(mean_square, size)
    return first, solve_ridge_of(seen, finals[:, size:]), mean_square


def _scale(mean_square: Tensor, size: int) -> Tensor:
    """[2D]: a chain goes on from outputs that are scaled to a root mean square of 1.
    What is solved here knows their mean alone."""
    scale = torch.ones(2 * size, device=mean_square.device)
    scale[:size] = mean_square.clamp_min(1e-12).rsqrt()
    return scale


def solve_ridge(second: Tensor, targets: Tensor, count: float) -> tuple[Tensor, float]:
    """The matrix W [I, O] with the least squared error |x W - z|^2 plus the ridge, from the sums of x x' [I, I] and of
    x z' [I, O]; and the ridge: (sums + ridge) W = targets."""
    ridge = _ridge(len(second), count, float(second.diagonal().double().mean()))
    return _solve(second.double(), targets.double(), ridge).float(), ridge


def solve_ridge_of(inputs: Tensor, aims: Tensor) -> Tensor:
    """The matrix W [I, O] of `solve_ridge`, from positions x [N, I] and z [N, O]. By far faster for N << I.

    W = x' (x x' + ridge)^-1 z (Saunders et al., Ridge regression learning algorithm in dual variables, 1998).
    """
    count, size = inputs.shape
    exact = inputs.double()
    ridge = _ridge(size, count, float(exact.square().sum()) / size)
    return inputs.T @ _solve(exact @ exact.T, aims.double(), ridge).float()


def _ridge(num_inputs: int, count: float, mean_square: float) -> float:
    """`mean_square`: the mean over inputs of the sum of their squares over the positions."""
    share = min(max(RIDGE_PER_LOAD * num_inputs / max(count, 1.0), LEAST_RIDGE), MOST_RIDGE)
    return share * mean_square + 1e-9


def _solve(matrix: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """(matrix + ridge)^-1 targets in float64. Overwrites `matrix`, which may be all the memory that there is."""
    matrix.diagonal().add_(ridge)
    torch.linalg.cholesky(matrix, out=matrix)
    return torch.cholesky_solve(targets, matrix)
