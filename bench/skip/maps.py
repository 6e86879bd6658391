"""Linear maps from the state at one depth to the state at a deeper one, fitted in closed form."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.ladder.unit import EPSILON

RIDGE = 1e-3

# (depth of the state that is mapped, depth of the state that it is mapped to).
Pair = tuple[int, int]


@dataclass(frozen=True)
class StateMap:
    """Adds to a state a linear function of the same state, scaled to a root mean square of 1. `weight` [D + 1, D]; last row: bias."""

    weight: Tensor

    def __call__(self, states: Tensor) -> Tensor:
        """States [N, D] -> [N, D]."""
        unit, scale = _scaled(states)
        return states + (unit @ self.weight[:-1] + self.weight[-1]) * scale


class MapFit:
    """Ridge regression of `StateMap`s, over states that are added chunk by chunk."""

    def __init__(self, pairs: Iterable[Pair], width: int) -> None:
        self._pairs = tuple(pairs)
        sources = {source for source, _ in self._pairs}
        self._moments = {source: torch.zeros(width + 1, width + 1).double() for source in sources}
        self._products = {pair: torch.zeros(width + 1, width).double() for pair in self._pairs}

    @property
    def depths(self) -> list[int]:
        """Those whose states `add` takes."""
        return sorted({depth for pair in self._pairs for depth in pair})

    def add(self, states: Mapping[int, Tensor]) -> None:
        """`states`: depth -> [N, D], the same positions at every depth."""
        for source, moments in self._moments.items():
            unit, scale = _scaled(states[source])
            inputs = torch.cat([unit, torch.ones(len(unit), 1)], 1)
            moments += (inputs.T @ inputs).double()
            for own, target in self._pairs:
                if own == source:
                    difference = (states[target].float() - states[source].float()) / scale
                    self._products[own, target] += (inputs.T @ difference).double()

    def solve(self, pair: Pair, rank: int | None = None) -> StateMap:
        """The map of least squared error, or that of least error among those of `rank`."""
        moments = self._moments[pair[0]]
        moments = moments + RIDGE * moments.diagonal().mean() * torch.eye(len(moments)).double()
        weight = torch.linalg.solve(moments, self._products[pair])
        if rank is not None:
            # Reduced-rank regression: the leading directions of the fitted values.
            fitted = torch.linalg.cholesky(moments).T @ weight
            directions = torch.linalg.svd(fitted, full_matrices=False).Vh[:rank]
            weight = weight @ directions.T @ directions
        return StateMap(weight.float())


def _scaled(states: Tensor) -> tuple[Tensor, Tensor]:
    """States [N, D] scaled to a root mean square of 1, and the roots [N, 1]."""
    states = states.float()
    scale = (states.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    return states / scale, scale
