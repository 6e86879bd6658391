"""Fits of state maps find a linear relation, and the best one of a rank."""

import torch

from bench.skip.maps import MapFit
from shared.ladder.unit import unit

WIDTH, COUNT = 12, 4000


def fitted(change: torch.Tensor) -> tuple[MapFit, torch.Tensor, torch.Tensor]:
    """A fit over two chunks of states at depth 3, and what they are at depth 5: themselves plus their scale times unit @ `change`."""
    states = 7.0 * torch.randn(COUNT, WIDTH)
    deeper = states + (unit(states) @ change + 0.5) * states.square().mean(-1, keepdim=True).sqrt()
    fit = MapFit([(3, 5)], WIDTH)
    for rows in (slice(0, 1000), slice(1000, None)):
        fit.add({3: states[rows], 5: deeper[rows]})
    return fit, states, deeper


def test_a_linear_relation_is_found():
    fit, states, deeper = fitted(torch.randn(WIDTH, WIDTH))
    error = (fit.solve((3, 5))(states) - deeper).square().mean() / deeper.square().mean()
    assert fit.depths == [3, 5]
    assert error < 1e-4


def test_a_map_of_a_rank_is_the_best_of_that_rank():
    strong, weak = torch.randn(WIDTH, 2) @ torch.randn(2, WIDTH), 0.01 * torch.randn(WIDTH, WIDTH)
    fit, states, deeper = fitted(strong + weak)
    # The bias is a third direction.
    found = fit.solve((3, 5), rank=3)
    assert torch.linalg.matrix_rank(found.weight, tol=1e-4) == 3
    error = (found(states) - deeper).square().mean() / (states - deeper).square().mean()
    assert error < 1e-3
    worse = fit.solve((3, 5), rank=1)
    assert (worse(states) - deeper).square().mean() > 10 * (found(states) - deeper).square().mean()
