"""A matrix whose rows are those of two others in turn, as gpt-oss has gate and up."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared import ops
from shared.model.remembered.packed import PackedMatrices
from shared.model.weights.stored import ALL_ROWS, Stored

# The rows of the first and of the second one.
TURNS = (slice(0, None, 2), slice(1, None, 2))


class InTurn(Stored):
    """Two matrices [N, K], whose rows follow each other in turn: [2 N, K], packed in float32 if they differ in format.
    `name` and `matrices`: where it is kept while loading once it is packed."""

    def __init__(self, parts: Sequence[Stored], name: str = "", matrices: PackedMatrices | None = None) -> None:
        first, second = self.parts = tuple(parts)
        self._name, self._matrices = name, matrices or PackedMatrices()
        form = first.format if first.format == second.format else f"{first.format}+{second.format}"
        super().__init__(2 * first.rows, first.columns, form, transposed=first.transposed)
        self.device_kind = first.device_kind if first.format == second.format else ""

    def dequantised_rows(self) -> Tensor:
        return _in_turn([part.dequantised_rows() for part in self.parts])

    def device_blocks(self) -> Tensor:
        return _in_turn([part.device_blocks() for part in self.parts])

    def pack(self, rows: slice = ALL_ROWS) -> Tensor:
        return self._matrices.get(f"{self._name}:{rows}", lambda: self._packed(rows))

    def _packed(self, rows: slice) -> Tensor:
        if self.device_kind:
            return ops.pack_blocks(self.device_blocks()[rows].contiguous(), self.format, self.columns)
        return ops.pack_linear(self.dequantised_rows()[rows].to(getattr(torch, self.format, torch.float32)))


def _in_turn(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([*parts], 1).flatten(0, 1)
