"""Matrices that consist of others: one below the other, row by row in turn, or one for each expert."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shared import ops
from shared.model.remembered.packed import PackedMatrices
from shared.model.weights.stored import ALL_ROWS, Stored

# The rows of the first and of the second one of two that are in turn.
TURNS = (slice(0, None, 2), slice(1, None, 2))


class _Rows(Stored):
    """The rows of matrices [N_i, K], which may differ in format."""

    def __init__(self, parts: Sequence[Stored]) -> None:
        self.parts = tuple(parts)
        formats = "+".join(dict.fromkeys(part.format for part in parts))
        super().__init__(sum(p.rows for p in parts), parts[0].columns, formats, transposed=parts[0].transposed)
        self.dtype, self.device, self.device_kind = parts[0].dtype, parts[0].device, _one_kind(parts)

    def pack(self, rows: slice = ALL_ROWS) -> Tensor:
        # Dequantised numbers fit the dtype they come from.
        dtype = getattr(torch, self.format, torch.float32)
        return ops.pack_linear(self.dequantised_rows()[rows].to(dtype))


class Joined(_Rows):
    """Matrices one below the other, as one parameter holds gate and up. Blocks of quants cannot be made again."""

    def dequantised_rows(self) -> Tensor:
        return torch.cat([part.dequantised_rows() for part in self.parts])

    def rounded(self) -> Tensor:
        return torch.cat([part.rounded() for part in self.parts])


class InTurn(_Rows):
    """Two matrices [N, K], whose rows follow each other in turn, as gpt-oss has gate and up: [2 N, K]. `name` and
    `matrices`: where it is kept while loading once it is packed."""

    def __init__(self, parts: Sequence[Stored], name: str = "", matrices: PackedMatrices | None = None) -> None:
        super().__init__(parts)
        self._name, self._matrices = name, matrices or PackedMatrices()

    def dequantised_rows(self) -> Tensor:
        return _in_turn([part.dequantised_rows() for part in self.parts])

    def device_blocks(self) -> Tensor:
        return _in_turn([part.device_blocks() for part in self.parts])

    def rounded(self) -> Tensor:
        return _in_turn([part.rounded() for part in self.parts], int(self.transposed))

    def pack(self, rows: slice = ALL_ROWS) -> Tensor:
        return self._matrices.get(f"{self._name}:{rows}", lambda: self._packed(rows))

    def _packed(self, rows: slice) -> Tensor:
        if self.device_kind:
            return ops.pack_blocks(self.device_blocks()[rows].contiguous(), self.format, self.columns)
        return super().pack(rows)


class Stacked(Stored):
    """Matrices [N, K] of one shape and format, as one parameter [E, N, K] holds those of several experts; [E, K, N] if
    transposed."""

    def __init__(self, parts: Sequence[Stored]) -> None:
        self.parts = tuple(parts)
        first = parts[0]
        super().__init__(first.rows, first.columns, first.format, transposed=first.transposed)
        self.dtype, self.device, self.device_kind = first.dtype, first.device, _one_kind(parts)

    @property
    def sections(self) -> "tuple[Stored, ...]":
        if self.device_kind or not all(isinstance(part, Joined) for part in self.parts):
            return (self,)
        return tuple(Stacked(parts) for parts in zip(*(part.parts for part in self.parts), strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.parts), *super().shape

    def dequantised(self) -> Tensor:
        return torch.stack([part.dequantised() for part in self.parts])

    def rounded(self) -> Tensor:
        return torch.stack([part.rounded() for part in self.parts])

    def rounded_parts(self) -> Iterator[Tensor]:
        return (numbers for part in self.parts for numbers in part.rounded_parts())

    def dequantised_rows(self) -> Tensor:
        """float32 [E, N, K]."""
        return torch.stack([part.dequantised_rows() for part in self.parts])

    def pack(self, rows: slice = ALL_ROWS) -> Tensor:
        raise NotImplementedError("several matrices are packed one by one")


def _one_kind(parts: Sequence[Stored]) -> str:
    """The kind of blocks of all parts. Empty if they differ."""
    kinds = {part.device_kind for part in parts}
    return kinds.pop() if len(kinds) == 1 else ""


def _in_turn(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.stack([*parts], dim + 1).flatten(dim, dim + 1)
