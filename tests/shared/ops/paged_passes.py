"""Random arguments for tests of `paged_attention`, on any device."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.ops.paged import paged_attention

CLOSE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-4},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


@dataclass(frozen=True)
class Pass:
    """The arguments of one call. `pages` are in random order, and no two rows share a page."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    pages: Tensor
    rows: Tensor
    positions: Tensor
    scaling: float = 0.3
    softcap: float = 0.0
    window: int = 0

    def run(self) -> Tensor:
        return paged_attention(**vars(self))

    def copied(self) -> "Pass":
        """Runs the call on copies of the pools, because a call changes them."""
        return replace(self, keys=self.keys.clone(), values=self.values.clone())

    def alone(self, tokens: Tensor) -> "Pass":
        """The pass over some of its tokens, given by their indices [N] int64."""
        q, k, v = (t[tokens] for t in (self.q, self.k, self.v))
        return replace(
            self, q=q, k=k, v=v, rows=self.rows[tokens], positions=self.positions[tokens]
        )


def drawn_pass(
    counts: list[int],
    lengths: list[int],
    padding: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    slots: int,
    dtype: torch.dtype,
    transposed: bool = False,
    **options: float,
) -> Pass:
    """A pass. Per row: its number of new tokens, and of positions before them. `padding` tokens are added. Slots past the end hold NaN."""
    (group, kv_heads), (width, value_width) = heads, widths
    needed = [(count + length + slots - 1) // slots for count, length in zip(counts, lengths, strict=True)]  # fmt: skip
    num_pages = sum(needed) + 2
    order = torch.randperm(num_pages)
    pages = torch.full((len(counts), max(needed) + 1), -1)
    rows, positions, taken = [], [], 0
    keys = torch.full((num_pages, kv_heads, slots, width), float("nan"))
    values = torch.full((num_pages, kv_heads, slots, value_width), float("nan"))
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        pages[row, : needed[row]] = order[taken : taken + needed[row]]
        taken += needed[row]
        held = torch.arange(length)
        page, slot = pages[row, held // slots], held % slots
        keys[page, :, slot] = torch.randn(length, kv_heads, width)
        values[page, :, slot] = torch.randn(length, kv_heads, value_width)
        rows += [row] * count
        positions += range(length, length + count)
    rows = torch.tensor(rows + [-7] * padding, dtype=torch.int64)
    positions = torch.tensor(positions + [-1] * padding, dtype=torch.int64)
    mixed = torch.randperm(len(rows))

    def made(num_heads: int, size: int) -> Tensor:
        if transposed:  # [1, H, T, D], as transformers hands it
            return torch.randn(1, num_heads, len(rows), size + 3).to(dtype)[0, :, :, :size].transpose(0, 1)  # fmt: skip
        return torch.randn(len(rows), num_heads, size).to(dtype)

    tokens = (made(group * kv_heads, width), made(kv_heads, width), made(kv_heads, value_width))
    pools = (keys.to(dtype), values.to(dtype))
    return Pass(*tokens, *pools, pages, rows[mixed], positions[mixed], **options)
