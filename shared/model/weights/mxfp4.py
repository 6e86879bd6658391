"""Experts in MXFP4, as folders of gpt-oss have them: `NAME_blocks` uint8 [E, N, K / 32, 16] and `NAME_scales` uint8
[E, N, K / 32] in place of `NAME` [E, K, N].

A byte has two inputs that follow each other, the first one in its lower half. GGUF's blocks of the same name have the
same quants in another order, and the same exponents, so no number changes. Source: OCP Microscaling Formats 1.0, and
transformers' `convert_moe_packed_tensors`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor
from transformers import PreTrainedConfig

from shared.model.remembered.packed import PackedMatrices
from shared.model.weights.composed import TURNS, InTurn, Stacked
from shared.model.weights.files import corrupt
from shared.model.weights.quantised import quantisation
from shared.model.weights.schemes import Place, Scheme
from shared.model.weights.stored import Blocks, Stored

_BLOCK_BYTES = 16  # without the exponent


class Mxfp4(Scheme):
    """The only way in which transformers stores them."""

    parts, suffix = ("_blocks", "_scales"), ""

    def shape_of(self, name: str, places: Mapping[str, Place]) -> tuple[int, int, int]:
        blocks, scales = places.get("blocks"), places.get("scales")
        if blocks is None or scales is None:
            there = next(iter(places.values()))
            raise corrupt(there.file.path, f"it has {name!r} without one of blocks and scales")
        fits = {blocks.dtype, scales.dtype} == {torch.uint8} and len(blocks.shape) == 4
        if not fits or blocks.shape != (*scales.shape, _BLOCK_BYTES) or 0 in blocks.shape:
            raise corrupt(blocks.file.path, f"the tensors of {name!r} do not fit each other")
        experts, rows, groups = scales.shape
        return experts, groups * 32, rows

    def stored(
        self, name: str, places: Mapping[str, Place], target_dtype: torch.dtype | None, matrices: PackedMatrices | None
    ) -> Stacked:
        experts, _, rows = self.shape_of(name, places)
        options: dict[str, Any] = {"target_dtype": target_dtype, "matrices": matrices}
        is_in_turn = name.endswith("gate_up_proj") and rows % 2 == 0
        turns = [torch.arange(turn.start, rows, turn.step) for turn in TURNS] if is_in_turn else []
        own: list[Stored] = []
        for number in range(experts):
            parts = [_Matrix(places["blocks"], places["scales"], number, turn, options) for turn in turns or (None,)]
            own.append(InTurn(parts, f"{name}:{number}", matrices) if turns else parts[0])
        return Stacked(own)


def scheme_of(config: PreTrainedConfig) -> Mxfp4 | None:
    """None if the checkpoint is in no MXFP4."""
    return Mxfp4() if quantisation(config) == "mxfp4" else None


class _Matrix(Blocks):
    """Matrix `number` of those tensors, or its rows `row_order` [N] int64."""

    def __init__(
        self, blocks: Place, scales: Place, number: int, row_order: Tensor | None, options: Mapping[str, Any]
    ) -> None:
        _, self._in_file, groups, size = blocks.shape
        self._scales = scales.file, scales.offset + number * self._in_file * groups, groups
        rows = self._in_file if row_order is None else len(row_order)
        place = (blocks.file, blocks.offset + number * self._in_file * groups * size, (rows, groups * 32))
        super().__init__(*place, GGMLQuantizationType.MXFP4, row_order=row_order, transposed=True, **options)

    def _blocks(self, read: Callable[[int, int], Tensor]) -> Tensor:
        file, offset, groups = self._scales
        quants = read(self._place[1], self._in_file * groups * _BLOCK_BYTES).view(self._in_file, -1)
        exponents = file.read(offset, self._in_file * groups).view(self._in_file, -1)
        if self._row_order is not None:
            quants, exponents = quants[self._row_order], exponents[self._row_order]
        return _as_in_gguf(quants, exponents, groups)

    def _rows_in_file(self, rows: Sequence[int]) -> Tensor:
        file, offset, groups = self._scales
        quants = self._place[0].read_rows(self._place[1], groups * _BLOCK_BYTES, rows)
        return _as_in_gguf(quants, file.read_rows(offset, groups, rows), groups)


def _as_in_gguf(quants: Tensor, exponents: Tensor, groups: int) -> Tensor:
    """uint8 [N, K / 32 * 17]: of each block the exponent, and bytes with input i in the lower half and input 16 + i in
    the upper one."""
    lower, upper = quants.view(-1, groups, 2, _BLOCK_BYTES // 2).unbind(2)
    even, odd = (lower & 15) | upper << 4, lower >> 4 | (upper & 240)
    return torch.cat([exponents.view(-1, groups, 1), torch.stack([even, odd], -1).flatten(2)], -1).flatten(1)
