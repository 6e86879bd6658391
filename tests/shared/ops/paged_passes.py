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
    """The arguments of one call. Blocks are in random order, and no two sequences share a block."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    block_tables: Tensor
    table_indices: Tensor
    positions: Tensor
    scaling: float = 0.3
    softcap: float = 0.0
    window: int = 0
    sinks: Tensor | None = None

    def run(self) -> Tensor:
        return paged_attention(**vars(self))

    def copied(self) -> "Pass":
        """Runs the call on copies of the pools, because a call changes them."""
        return replace(self, keys=self.keys.clone(), values=self.values.clone())

    def alone(self, tokens: Tensor) -> "Pass":
        """The pass over some of its tokens, given by their indices [N] int64."""
        names = ("q", "k", "v", "table_indices", "positions")
        return replace(self, **{name: getattr(self, name)[tokens] for name in names})


def drawn_pass(
    counts: list[int],
    lengths: list[int],
    padding: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    block_tokens: int,
    dtype: torch.dtype,
    transposed: bool = False,
    **options: float,
) -> Pass:
    """A pass. Per sequence: its number of new tokens, and of positions before them. `padding` tokens are added. Slots
    past the end hold NaN."""
    (group, kv_heads), (width, value_width) = heads, widths
    needed = [
        (count + length + block_tokens - 1) // block_tokens for count, length in zip(counts, lengths, strict=True)
    ]
    num_blocks = sum(needed) + 2
    order = torch.randperm(num_blocks)
    block_tables = torch.full((len(counts), max(needed) + 1), -1)
    table_indices, positions, taken = [], [], 0
    keys = torch.full((num_blocks, kv_heads, block_tokens, width), float("nan"))
    values = torch.full((num_blocks, kv_heads, block_tokens, value_width), float("nan"))
    for table, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        block_tables[table, : needed[table]] = order[taken : taken + needed[table]]
        taken += needed[table]
        held = torch.arange(length)
        block, slot = block_tables[table, held // block_tokens], held % block_tokens
        keys[block, :, slot] = torch.randn(length, kv_heads, width)
        values[block, :, slot] = torch.randn(length, kv_heads, value_width)
        positions += range(length, length + count)
        table_indices += [table] * count
    table_indices = torch.tensor(table_indices + [-7] * padding, dtype=torch.int64)
    positions = torch.tensor(positions + [-1] * padding, dtype=torch.int64)
    mixed = torch.randperm(len(positions))

    def made(num_heads: int, size: int) -> Tensor:
        if transposed:  # [1, H, T, D], as transformers hands it
            return torch.randn(1, num_heads, len(positions), size + 3).to(dtype)[0, :, :, :size].transpose(0, 1)
        return torch.randn(len(positions), num_heads, size).to(dtype)

    tokens = (made(group * kv_heads, width), made(kv_heads, width), made(kv_heads, value_width))
    pools = (keys.to(dtype), values.to(dtype))
    return Pass(
        *tokens,
        *pools,
        block_tables,
        table_indices[mixed],
        positions[mixed],
        **options,
    )


# An argument of a pass of two tokens, four heads and two of keys, and what its refusal says.
WRONG_ARGUMENTS = [
    ("q", torch.randn(2, 3, 8), "3 query heads cannot share 2 key heads"),
    ("q", torch.randn(2, 4, 8).double(), "q must be float32, float16 or bfloat16"),
    ("q", torch.randn(2, 4, 16)[:, :, ::2], "last dimension of q"),
    ("k", torch.randn(2, 2, 9), r"k has shape \[2, 2, 9\], want \[2, any, 8\]"),
    ("v", torch.randn(2, 2, 8).half(), "v is of another dtype than q"),
    ("keys", torch.randn(3, 2, 8, 4).transpose(2, 3), "keys must be contiguous"),
    ("values", torch.randn(2, 2, 4, 8), "values has shape"),
    ("block_tables", torch.zeros(1, 3, dtype=torch.int32), "block_tables must be int64"),
    ("table_indices", torch.zeros(1, dtype=torch.int64), "table_indices has shape"),
    ("window", -1, "at least 0"),
    ("sinks", torch.zeros(3), r"sinks must be contiguous floats \[4\]"),
]  # fmt: skip
