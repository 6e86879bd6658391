"""What products are compiled with: sizes of tiles, and what follows from them. Knows no triton."""

from dataclasses import dataclass
from typing import Any

import torch

from shared.ops.blocks import Layout

# Tokens of a tile: a power of two from the first to the last.
LEAST_TOKENS, MOST_TOKENS = 16, 256
# A matrix in blocks keeps so many programs busy, because they dequantise; pieces of it have at least so many columns.
PROGRAMS, LEAST_PIECE = 256, 512
# What a block may share of a multiprocessor, in bytes, by compute capability, and 99 KB elsewhere.
SHARED = {75: 64 << 10, 80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
LEAST_SHARED = 99 << 10


@dataclass(frozen=True)
class ProductTiles:
    """Constants of the kernel `multiply` of `shared.ops.product_kernel`: of a matrix [rows, width] in `layout`, None if
    it is plain, times tokens of `dtype`, on a device of this compute capability, such as 90.

    What decides the order of sums, `step` and `num_pieces`, follows from these alone, never from the tokens.
    """

    rows: int
    width: int
    layout: Layout | None
    dtype: torch.dtype
    capability: int

    @property
    def multiplies(self) -> bool:
        """Whether matrix instructions multiply the dtype: Triton has none before Ampere. Else all is in float32."""
        return self.capability >= 80 and self.dtype != torch.float32

    @property
    def step(self) -> int:
        """Columns of a step."""
        if self.layout is not None:
            return self.layout.step
        return 64 if self.multiplies else 32

    @property
    def num_pieces(self) -> int:
        """Pieces of the columns that are summed apart."""
        most = max(1, self.width // LEAST_PIECE)
        wanted = 1 if self.layout is None else -(-PROGRAMS // -(-self.rows // 64))
        pieces = 1
        while 2 * pieces <= min(most, wanted, 8):
            pieces *= 2
        return -(-self.width // self.piece_of(pieces))

    def piece_of(self, pieces: int) -> int:
        """The columns of a piece, whole steps, if there are so many pieces."""
        return -(-self.width // (pieces * self.step)) * self.step

    @property
    def piece(self) -> int:
        return self.piece_of(self.num_pieces)

    def tile_tokens(self, num_tokens: int) -> int:
        most = MOST_TOKENS if self.capability // 10 in (9, 10) else 128
        if self.layout is not None:
            # More has no room in the registers.
            most = 128 if self.layout.high != 1 else 32 if self.capability // 10 == 10 else 64
        if not self.multiplies:
            most = 32
        return min(max(LEAST_TOKENS, 1 << (num_tokens - 1).bit_length()), most)

    def tile_rows(self, tile_tokens: int) -> int:
        """64 rows are what an instruction of Hopper multiplies."""
        return 128 if tile_tokens >= 128 and self.layout is None else 64

    def constants(self, num_tokens: int, biased: bool) -> dict[str, Any]:
        tokens = self.tile_tokens(num_tokens)
        layout = self.layout
        return {
            "BN": self.tile_rows(tokens), "BT": tokens, "STEP": self.step, "PIECE": self.piece,
            "PIECES": self.num_pieces, "SPLIT": self.splits(num_tokens), "BIASED": biased,
            "WIDENS": not self.multiplies, "EVEN": self.width % self.step == 0,
            "BITS": 0 if layout is None else layout.bits, "HIGH": 0 if layout is None else layout.high,
            "SCALES": 0 if layout is None else layout.scales,
            "SPAN": 32 if layout is None else layout.span, "ZERO": 0 if layout is None else layout.zero,
        }  # fmt: skip

    def splits(self, num_tokens: int) -> bool:
        """Whether pieces are programs of their own, which changes no bit: where there are few tokens."""
        return self.num_pieces > 1 and num_tokens <= 4 * LEAST_TOKENS

    def options(self, num_tokens: int) -> dict[str, Any]:
        """Warps and steps on their way at once: as many as what a multiprocessor shares has room for."""
        tokens = self.tile_tokens(num_tokens)
        weights = self.tile_rows(tokens) * (2.0 if self.layout is None else self.layout.bytes_per_weight)
        step_bytes = int(self.step * (2 * tokens + weights)) * (1 if self.multiplies else 2)
        room = SHARED.get(self.capability, LEAST_SHARED)
        beside = 1 if tokens == MOST_TOKENS else 2  # blocks of a multiprocessor
        return {
            "num_warps": 8 if tokens >= (128 if self.layout is None else 64) else 4,
            "num_stages": min(6, max(2, room // step_bytes // beside)),
        }
