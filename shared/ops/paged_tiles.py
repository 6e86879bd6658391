"""What paged attention is compiled with: sizes of tiles, and what follows from them. Knows no triton."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tiles:
    """Constants of the kernels of `shared.ops.paged_kernel`, where their names are explained: of a layer on a device of
    this compute capability, such as 90.

    They follow from these alone, never from a pass: other tiles could sum in another order.
    """

    heads: int
    kv_heads: int
    width: int
    value_width: int
    block_tokens: int
    dtype: torch.dtype
    is_capped: bool
    capability: int
    has_sinks: bool = False

    @property
    def widest(self) -> int:
        return max(_padded(self.width), _padded(self.value_width))

    @property
    def rows(self) -> int:
        """Rows of a tile: 64 is what an instruction of Hopper multiplies."""
        return 16 if not self.multiplies or self.widest > 256 else 64 if self.widest <= 128 else 32

    @property
    def keys(self) -> int:
        """Keys that are multiplied at once."""
        if self.capability >= 120 and self.multiplies and self.widest == 128 > min(self.width, self.value_width):
            return 32  # the masks of widths that are no power of two take registers, too
        return max(16, (64 if self.multiplies else 32) // max(1, self.widest // 128))

    @property
    def multiplies(self) -> bool:
        """Whether matrix instructions multiply the dtype: Triton has none before Ampere. Else all is in float32."""
        return self.capability >= 80 and self.dtype != torch.float32

    @property
    def tile_heads(self) -> int:
        return min(_power_of_two(self.heads // self.kv_heads), self.rows)

    @property
    def tile_tokens(self) -> int:
        """Positions of a tile. It must lie within one block of keys."""
        return min(self.rows // self.tile_heads, self.keys)

    @property
    def head_tiles(self) -> int:
        """Tiles of the heads of a token."""
        return self.kv_heads * -(-self.heads // self.kv_heads // self.tile_heads)

    @property
    def warps(self) -> int:
        """So many that nothing spills, as compilers are today."""
        if self.dtype == torch.float32:
            return 4 if self.capability // 10 == 10 else 8
        if self.capability < 80:
            return 4 if self.widest > 64 else 8
        return 4 if self.widest <= 64 and self.capability // 10 in (9, 10) else 8

    @property
    def stages(self) -> int:
        """Blocks of keys and values on their way at once: two fit what the smallest multiprocessor shares, 99 KB."""
        return 2 if self.widest <= 256 else 1

    def enter(self, split: bool) -> dict[str, Any]:
        """Constants of the kernel `enter`."""
        return {
            "HEADS": self.heads, "KV_HEADS": self.kv_heads, "D": self.width, "DV": self.value_width,
            "G": self.block_tokens, "TOK": self.tile_tokens, "SPLIT": split, "DP": _padded(self.width),
            "DVP": _padded(self.value_width),
        }  # fmt: skip

    def attend(self, split: bool) -> dict[str, Any]:
        """Constants of the kernel `attend`."""
        return self.enter(split) | {
            "TILE_HEADS": self.tile_heads, "BR": self.rows, "BK": self.keys, "CAPPED": self.is_capped,
            "WIDENS": not self.multiplies, "SINKS": self.has_sinks,
        }  # fmt: skip

    @property
    def join(self) -> dict[str, Any]:
        """Constants of the kernel `join`."""
        return {name: self.attend(True)[name] for name in ("HEADS", "DV", "DVP", "G", "SINKS")}


def num_pieces(capacity: int) -> int:
    """Pieces of so many keys: see `piece_of` in `shared.ops.paged_kernel`."""
    last = capacity - 1
    octave = last.bit_length() - 1
    return 1 + (last >> 8 if last < 4096 else 8 * (octave - 11) + (last >> (octave - 3)))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _padded(width: int) -> int:
    """A width that a matrix instruction takes."""
    return max(16, _power_of_two(width))
