"""Sums that are added in another order for every number of rows and every place of a row, as a GPU's are."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def _pieces(row: Tensor, size: int) -> Tensor:
    """[N] -> [pieces, size], padded with zeros."""
    return torch.nn.functional.pad(row, (0, -len(row) % size)).reshape(-1, size)


def _total(row: Tensor, size: int) -> Tensor:
    """Piece by piece, the last first."""
    return _pieces(row, size).sum(1).flip(0).cumsum(0)[-1]


def _running(row: Tensor, size: int) -> Tensor:
    """Every piece on its own, and then what was before it."""
    pieces = _pieces(row, size)
    ends = pieces.sum(1)
    before = ends.cumsum(0) - ends
    return (pieces.cumsum(1) + before[:, None]).flatten()[: len(row)]


class OrdersOfSums(TorchDispatchMode):
    """Under this mode sums, running sums and softmaxes of rows [T, V] depend on T and on which row it is, in their last
    bits."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (aten.sum.dim_IntList, aten.cumsum.default):
            method = _total if func is aten.sum.dim_IntList else _running
            dim = args[1] if isinstance(args[1], int) else args[1][0]
            assert dim in (-1, args[0].dim() - 1)
            if args[0].dim() == 1:
                return method(args[0], 3)
            out = torch.stack([method(row, size) for row, size in self._rows(args[0])])
            keeps = len(args) > 2 and args[2] is True
            return out[:, None] if keeps else out
        if func in (aten._softmax.default, aten._log_softmax.default):
            parts = [(row - row.max()).exp() for row in args[0]]
            sums = [_total(part, size) for part, (_, size) in zip(parts, self._rows(args[0]), strict=True)]  # fmt: skip
            shares = torch.stack([part / total for part, total in zip(parts, sums, strict=True)])
            return shares if func is aten._softmax.default else shares.log()
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _rows(x: Tensor) -> list[tuple[Tensor, int]]:
        """Each row, and the size of the pieces it is added in."""
        return [(row, 3 + 2 * len(x) + index) for index, row in enumerate(x)]
