"""What a linear exit head is solved from: sums of products over positions.
They add, over texts, machines and calibrations. Few positions are kept themselves, which takes less memory and time."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from calibrator_service.calibration.files import write_atomically
from calibrator_service.calibration.ranks import Ranks
from calibrator_service.calibration.states.chunk import StateChunk
from shared.errors import Corrupt, PreconditionFailed
from shared.ladder.artefact import take_part
from shared.ladder.exit_head import NUM_STATES, unit

# Positions of one matrix product. It bounds the memory for their states in float32.
PIECE = 2048
# Positions that are kept, per number of one position. With more of them, solving from sums takes no longer.
KEPT_PER_WIDTH = 0.25
# Directions of projected sums, per number of one position, and the least share of the mean mean square along one.
# More directions gain nothing (docs/decisions/010); what is fainter is below every ridge.
DIRECTIONS_PER_WIDTH, FAINTEST = 0.25, 1e-3


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

    @property
    def num_sums(self) -> int:
        """Numbers that `Moments.to_tensors` returns, unless they are projected."""
        return self.width * (self.width + 1) // 2 + self.width * 2 * self.hidden_size

    def num_directions(self, most_bytes: float) -> int:
        """Of sums that are projected to at most `most_bytes`; at least one."""
        by_memory = int(most_bytes // (torch.half.itemsize * (self.width + 2 * self.hidden_size)))
        return max(1, min(by_memory, int(DIRECTIONS_PER_WIDTH * self.width)))


class Moments:
    """Sums over `count` positions t of a text, of which x = (settled states of t [3D], state entering at t + 1 [D], and
    at t + 2 [D]).

    `second` [5D, 5D]: of x x'. `targets` [5D, 2D]: of x z', where z are the final states [D] of t + 1 and t + 2, from
    which the full model chooses: as the LM head reads them. All other states are scaled to a root mean square of 1. The
    second step of a chain begins with the head's output for t + 1, which is linear in x: its sums follow from these, so
    one pass over the text is enough, and parts of a text may be summed apart.

    While positions are few, `kept` has them, and each access to a sum computes both anew.
    """

    def __init__(self, layout: MomentsLayout, device: torch.device | str = "cpu") -> None:
        self.layout, self.count, self.device = layout, 0.0, torch.device(device)
        # The numbers of x [W] and z [2D] of each position, as long as there are few.
        self._kept: list[tuple[Tensor, Tensor]] | None = []
        self._sums: tuple[Tensor, Tensor] | None = None

    @property
    def kept(self) -> tuple[Tensor, Tensor] | None:
        """x [N, 5D] and z [N, 2D] of all positions; None if only their sums are left."""
        rows = self._rows()
        return rows if rows is not None and len(rows[0]) == self.count else None

    def _rows(self) -> tuple[Tensor, Tensor] | None:
        if self._kept is None:
            return None
        width, num_finals = self.layout.width, 2 * self.layout.hidden_size
        empty = torch.zeros(0, width, device=self.device), torch.zeros(0, num_finals, device=self.device)
        states, finals = zip(empty, *self._kept, strict=True)
        return torch.cat(states), torch.cat(finals)

    @property
    def second(self) -> Tensor:
        return self._summed()[0]

    @property
    def targets(self) -> Tensor:
        return self._summed()[1]

    def _summed(self) -> tuple[Tensor, Tensor]:
        if self._sums is not None:
            return self._sums
        rows = self._rows()
        assert rows is not None
        states, finals = rows
        return states.T @ states, states.T @ finals

    def _forget_positions(self) -> tuple[Tensor, Tensor]:
        """The sums, which are all that is left from here on."""
        self._sums, self._kept = self._summed(), None
        return self._sums

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
            self._add(states[sane], finals[sane])

    def _add(self, states: Tensor, finals: Tensor) -> None:
        self.count += len(states)
        if self._kept is not None and self.count <= KEPT_PER_WIDTH * self.layout.width:
            self._kept.append((states, finals))
            return
        second, targets = self._forget_positions() if self._sums is None else self._sums
        second.addmm_(states.T, states)
        targets.addmm_(states.T, finals)

    def merge(self, other: "Moments", share: float = 1.0) -> None:
        """Adds `share` of the other's sums. Raises `PreconditionFailed` (LAYOUT_MISMATCH) if they are of other
        states."""
        if other.layout != self.layout:
            raise PreconditionFailed(
                f"the statistics are of {other.layout}, and those of this calibration of {self.layout}",
                reason="LAYOUT_MISMATCH",
            )
        for own, more in zip(self._forget_positions(), other._summed(), strict=True):
            own.add_(more.to(self.device), alpha=share)
        self.count += share * other.count

    def add_over(self, ranks: Ranks) -> None:
        """Becomes the sum over all ranks; of few positions only at the first one, which gets these themselves."""
        total = sum(ranks.everyones(self.count))
        if self._kept is not None and total <= KEPT_PER_WIDTH * self.layout.width:
            for theirs in ranks.others(self.kept):
                if theirs is not None:
                    self._add(*(numbers.to(self.device) for numbers in theirs))
            return
        for sums in self._forget_positions() if self._sums is None else self._sums:
            ranks.add(sums)
        self.count = total

    def to_tensors(self, *, with_positions: bool = False, most_bytes: float = math.inf) -> dict[str, Tensor]:
        """Tensors for safetensors: `second` as its upper triangle, row by row, `targets` and `count`. Sums that take
        more than `most_bytes` are projected.

        `with_positions`: x and z of each position instead, while there are few. They tell of the text.
        """
        count = torch.tensor([self.count], dtype=torch.float64)
        if with_positions and (kept := self.kept) is not None:
            return {"states": kept[0].cpu(), "finals": kept[1].cpu(), "count": count}
        if torch.float.itemsize * self.layout.num_sums > most_bytes:
            root, aims = self._projected(self.layout.num_directions(most_bytes))
            return {"root": root.half().cpu(), "aims": aims.half().cpu(), "count": count}
        second, targets = (sums.cpu() for sums in self._summed())
        triangle = torch.cat([second[row, row:] for row in range(self.layout.width)])
        return {"second": triangle, "targets": targets, "count": count}

    @torch.no_grad()
    def _projected(self, num_directions: int) -> tuple[Tensor, Tensor]:
        """`root` [K, 5D] and `aims` [K, 2D], of which count root' root is `second` and count root' aims is `targets`,
        in the K directions along which x varies most: as if K positions, one along each, had been all. Half of
        float32's bytes are enough for them.

        Halko et al., Finding structure with randomness, 2011: directions are found in a product with random ones.
        """
        second, targets = self._summed()
        generator = torch.Generator().manual_seed(0)
        tried = torch.randn(len(second), num_directions, generator=generator).to(second.device)
        span = torch.linalg.qr(second @ tried).Q
        values, turn = torch.linalg.eigh((span.T @ (second @ span)).double())
        told = values > FAINTEST * float(second.diagonal().double().mean())
        values, turn = (values[told] / max(self.count, 1.0)).sqrt(), turn[:, told].float()
        directions = (span @ turn).T
        aims = directions @ targets / (max(self.count, 1.0) * values[:, None]).float()
        return directions * values[:, None].float(), aims

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], layout: MomentsLayout, device: torch.device | str = "cpu"
    ) -> Self:
        """Raises `Corrupt` unless the tensors have the form that `to_tensors` returns, with finite numbers."""
        size, num_finals, moments = layout.width, 2 * layout.hidden_size, cls(layout, device)
        has_positions, is_projected = "states" in tensors, "root" in tensors
        shapes = {"second": (size * (size + 1) // 2,), "targets": (size, num_finals), "count": (1,)}
        for of_states, of_finals in (("states", "finals"), ("root", "aims")):
            if of_states in tensors:
                rows = len(tensors[of_states])
                shapes = {of_states: (rows, size), of_finals: (rows, num_finals), "count": (1,)}
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
            raise Corrupt("the statistics of an exit have not the shapes of their layout")
        if not all(tensor.is_floating_point() and bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise Corrupt("the statistics of an exit hold what is no finite number")
        if has_positions:
            moments._add(tensors["states"].float().to(device), tensors["finals"].float().to(device))
            return moments
        moments.count = float(tensors["count"])
        if is_projected:
            # The sums may take far more memory than the file: they are computed when they are added to others.
            weight = max(moments.count, 0.0) ** 0.5
            moments._kept = [(weight * tensors["root"].float().to(device), weight * tensors["aims"].float().to(device))]
            return moments
        second, targets = moments._forget_positions()
        rest = tensors["second"].float().to(device).split([*range(size, 0, -1)])
        for row, numbers in enumerate(rest):
            second[row, row:] = second[row:, row] = numbers
        targets.copy_(tensors["targets"])
        return moments


SAVE_INTERVAL_S = 120.0


class Sums:
    """Moments by exit depth, of the first `num_chunks` chunks of a text. `final` as in `Moments.add`."""

    def __init__(
        self,
        layouts: Mapping[int, MomentsLayout],
        final: Callable[[Tensor], Tensor],
        device: torch.device,
        path: Path | None = None,
    ) -> None:
        """Goes on from the file `path`, if there is one. Raises `Corrupt` if it cannot be read."""
        self.moments = {depth: Moments(layout, device) for depth, layout in layouts.items()}
        self.num_chunks = 0
        self._final, self._path, self._saved_s = final, path, time.monotonic()
        if path is not None and path.exists():
            self._load(path)

    def add(self, chunk: StateChunk) -> None:
        """Adds the next chunk, and writes the file if it is time. Raises as `write_atomically`."""
        for moments in self.moments.values():
            moments.add(chunk, self._final)
        self.num_chunks += 1
        if self._path is not None and time.monotonic() - self._saved_s >= SAVE_INTERVAL_S:
            self.save()

    def save(self) -> None:
        """Writes the file. Raises as `write_atomically`."""
        if self._path is None:
            return
        tensors = {
            f"{depth}.{name}": tensor
            for depth, moments in self.moments.items()
            for name, tensor in moments.to_tensors(with_positions=True).items()
        }
        tensors["num_chunks"] = torch.tensor([self.num_chunks])
        write_atomically(self._path, save(tensors))
        self._saved_s = time.monotonic()

    def _load(self, path: Path) -> None:
        try:
            tensors = load(path.read_bytes())
            self.num_chunks = int(tensors.pop("num_chunks"))
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
            raise Corrupt(f"{path.name} does not hold the sums of this calibration") from error
        for depth, moments in self.moments.items():
            part = take_part(tensors, str(depth))
            self.moments[depth] = Moments.from_tensors(part, moments.layout, moments.device)
