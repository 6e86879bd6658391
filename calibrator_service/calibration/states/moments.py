"""What a linear exit head is solved from: sums of products over positions.
They add, over texts, machines and calibrations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from calibrator_service.calibration.states.chunk import StateChunk
from shared.errors import Corrupt, PreconditionFailed
from shared.ladder.fused_head import NUM_STATES
from shared.ladder.unit import unit

# Positions of one matrix product. It bounds the memory for their states in float32.
PIECE = 2048


@dataclass(frozen=True)
class MomentsLayout:
    """Which states the sums are of: those at `kept_depths` and L of a settled token, and those at `depth` of the next
    two tokens."""

    hidden_size: int
    depth: int
    kept_depths: tuple[int, ...]

    @property
    def width(self) -> int:
        """Numbers of one position: its three settled states, and the states with which the next two tokens enter the
        exit."""
        return (NUM_STATES + 2) * self.hidden_size


class Moments:
    """Sums over `count` positions t of a text, of which x = (settled states of t [3D], state entering at t + 1 [D], and
    at t + 2 [D]).

    `second` [5D, 5D]: of x x'. `targets` [5D, 2D]: of x z', where z are the final states [D] of t + 1 and t + 2, from
    which the full model chooses: as the LM head reads them. All other states are scaled to a root mean square of 1. The
    second step of a chain begins with the head's output for t + 1, which is linear in x: its sums follow from these, so
    one pass over the text is enough, and parts of a text may be summed apart.
    """

    def __init__(self, layout: MomentsLayout, device: torch.device | str = "cpu") -> None:
        self.layout, self.count = layout, 0.0
        self.second = torch.zeros(layout.width, layout.width, device=device)
        self.targets = torch.zeros(layout.width, 2 * layout.hidden_size, device=device)

    @torch.no_grad()
    def add(self, chunk: StateChunk, final: Callable[[Tensor], Tensor]) -> None:
        """Adds the positions of a chunk that have two more after them. Those whose states are not finite are left out.

        `final`: deep states [N, D] of a chunk -> what the LM head reads [N, D].
        """
        layout = self.layout
        rows = chunk.rows[:-1][chunk.rows[1:] == chunk.rows[:-1] + 1]
        for piece in rows.split(PIECE):
            settled = [chunk.states[depth][piece - 1] for depth in layout.kept_depths]
            entering = chunk.states[layout.depth]
            parts = [*settled, chunk.deep[piece - 1], entering[piece], entering[piece + 1]]
            states = torch.cat([unit(part) for part in parts], -1)
            finals = torch.cat([final(chunk.deep[piece]), final(chunk.deep[piece + 1])], -1).float()
            sane = torch.cat([states, finals], -1).isfinite().all(-1)
            states, finals = states[sane], finals[sane]
            self.second.addmm_(states.T, states)
            self.targets.addmm_(states.T, finals)
            self.count += len(states)

    def merge(self, other: "Moments", share: float = 1.0) -> None:
        """Adds `share` of the other's sums. Raises `PreconditionFailed` (LAYOUT_MISMATCH) if they are of other
        states."""
        if other.layout != self.layout:
            raise PreconditionFailed(
                f"the statistics are of {other.layout}, and those of this calibration of {self.layout}",
                reason="LAYOUT_MISMATCH",
            )
        self.second.add_(other.second.to(self.second.device), alpha=share)
        self.targets.add_(other.targets.to(self.targets.device), alpha=share)
        self.count += share * other.count

    def to_tensors(self) -> dict[str, Tensor]:
        """Tensors for safetensors: `second` as its upper triangle, row by row, `targets` and `count`."""
        size = self.layout.width
        rows, columns = torch.triu_indices(size, size)
        return {
            "second": self.second.cpu()[rows, columns],
            "targets": self.targets.cpu(),
            "count": torch.tensor([self.count], dtype=torch.float64),
        }

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], layout: MomentsLayout, device: torch.device | str = "cpu"
    ) -> Self:
        """Raises `Corrupt` unless the tensors have the form that `to_tensors` returns, with finite numbers."""
        size = layout.width
        shapes = {"second": (size * (size + 1) // 2,), "targets": (size, 2 * layout.hidden_size), "count": (1,)}
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
            raise Corrupt("the statistics of an exit have not the shapes of their layout")
        if not all(tensor.is_floating_point() and bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise Corrupt("the statistics of an exit hold what is no finite number")
        moments = cls(layout, device)
        rows, columns = torch.triu_indices(size, size)
        moments.second[rows, columns] = moments.second[columns, rows] = tensors["second"].float().to(device)
        moments.targets.copy_(tensors["targets"])
        moments.count = float(tensors["count"])
        return moments
