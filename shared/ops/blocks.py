"""GGUF's blocks on a GPU, and the groups of AWQ and GPTQ: how a matrix [N, K] lies in memory there, and what numbers
it stands for.

Quants and scales lie apart, a word or 32 bytes of each row beside those of the next row, so that programs over many
rows read without gaps. It takes 1.00 to 1.11 times the bytes of the file.

- `low` uint8 [G, N, 32]: 4 bits of the quants of two groups of 32 columns, the first of them in the lower half, or 8
  bits (two's complement) of one group.
- `high` uint8 [G, N, 32]: further bits, 2 of each of four groups or 1 of each of eight. Empty without.
- `scales` int32 [G, N]: of a group a scale and an addend (float16), or of two groups four scales or scales and addends
  of 8 bits; or of one, two or four groups a scale (float16) and a zero (int16). `supers` int32 [K / 256, N]: what
  scales of 8 bits are multiplied by (float16 each). Empty without.

A quant of MXFP4 is the float of 4 bits itself, and a word has the exponents of four groups.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32


class Blocks(NamedTuple):
    """A matrix in blocks, as above."""

    low: Tensor
    high: Tensor
    scales: Tensor
    supers: Tensor

    @property
    def rows(self) -> int:
        return self.low.shape[1]


@dataclass(frozen=True)
class Layout:
    """`bits` and `high`: bits of a quant in `low` and in `high`. `step`: columns whose bytes are whole. `scales`: 0: a
    scale and an addend of a group; 1: 6 bits of each, and supers; 2: a signed scale for 16 columns, and supers; 3: a
    scale and a zero; 4: exponents. `zero`: what a quant of 0 is written as. `block`: columns of a block of the file.
    `span`: columns of a word of scales."""

    bits: int
    high: int
    step: int
    scales: int
    zero: int
    block: int
    span: int = GROUP

    @property
    def bytes_per_weight(self) -> float:
        return (self.bits + self.high) / 8 + 4 / self.span + (4 / 256 if self.has_supers else 0)

    @property
    def has_supers(self) -> bool:
        return self.scales in (1, 2)


# What the quants of MXFP4 stand for, doubled.
_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)

LAYOUTS = {
    "Q4_0": Layout(4, 0, 64, 0, 8, 32),
    "Q4_1": Layout(4, 0, 64, 0, 0, 32),
    "Q5_0": Layout(4, 1, 256, 0, 16, 32),
    "Q5_1": Layout(4, 1, 256, 0, 0, 32),
    "Q8_0": Layout(8, 0, 64, 0, 0, 32),
    "Q4_K": Layout(4, 0, 64, 1, 0, 256, 64),
    "Q5_K": Layout(4, 1, 256, 1, 0, 256, 64),
    "Q6_K": Layout(4, 2, 128, 2, 32, 256, 64),
    "MXFP4": Layout(4, 0, 128, 4, 0, 32, 128),
    **{f"W4_{span}": Layout(4, 0, max(span, 64), 3, 0, span, span) for span in (32, 64, 128)},
}


def arranged(blocks: Tensor, kind: str, width: int) -> Blocks:
    """Rows of a file's blocks [N, bytes per row] uint8 of one kind, arranged as above, on their device."""
    layout, rows = LAYOUTS[kind], blocks.shape[0]
    quants, scales, supers = _PARTS[kind](blocks.view(rows, width // layout.block, -1))
    groups = -(-width // layout.step) * layout.step // GROUP
    quants = F.pad(quants.reshape(rows, -1, GROUP), (0, 0, 0, groups - width // GROUP)).transpose(0, 1)
    scales = scales.reshape(rows, -1)
    scales = F.pad(scales, (0, groups * GROUP // layout.span - scales.shape[1])).T.contiguous()
    supers = supers.reshape(rows, -1).T.contiguous() if layout.has_supers else scales.new_empty(0)
    if layout.bits == 8:
        return Blocks(quants.contiguous(), quants.new_empty(0), scales, supers)
    lower = quants & 15
    low = (lower[0::2] | lower[1::2] << 4).contiguous()
    high = quants.new_empty(0)
    if layout.high:
        share, upper = 8 // layout.high, quants >> 4
        high = torch.zeros_like(upper[::share])
        for place in range(share):
            high |= upper[place::share] << (layout.high * place)
    return Blocks(low, high.contiguous(), scales, supers)


def arranged_bytes(kind: str, rows: int, width: int) -> int:
    """What `arranged` takes."""
    layout = LAYOUTS[kind]
    return int(rows * -(-width // layout.step) * layout.step * layout.bytes_per_weight)


def widened(blocks: Blocks, kind: str, width: int, rows: Tensor | slice = slice(None)) -> Tensor:
    """Rows of the matrix, float32 [n, K]: the numbers that GGUF's reference code gives, on the blocks' device. `rows`:
    int64 [n], or a slice."""
    layout = LAYOUTS[kind]
    low = blocks.low[:, rows]
    if layout.bits == 8:
        quants = low.view(torch.int8).int()
    else:
        quants = torch.stack([low & 15, low >> 4], 1).flatten(0, 1).int()
        if layout.high:
            share, upper = 8 // layout.high, blocks.high[:, rows]
            mask = (1 << layout.high) - 1
            parts = [(upper >> (layout.high * place)) & mask for place in range(share)]
            quants += torch.stack(parts, 1).flatten(0, 1).int() << 4
    numbers = (quants - layout.zero).float()  # [groups, n, 32]
    words = blocks.scales[:, rows]
    if layout.scales == 4:
        exponents = words.contiguous().view(torch.uint8).view(*words.shape, 4).transpose(1, 2).flatten(0, 1).int()
        powers = torch.where(exponents < 2, (exponents + 1) << 21, (exponents - 1) << 23).view(torch.float32)
        numbers = torch.tensor(_DOUBLED, device=low.device)[quants] * powers[..., None]
    elif layout.scales == 0:
        scale, addend = _halves(words)
        numbers = scale[..., None] * numbers + addend[..., None]
    elif layout.scales == 3:
        words = words.repeat_interleave(layout.span // GROUP, 0)
        numbers = (numbers - (words >> 16)[..., None]) * _halves(words)[0][..., None]
    else:
        eight = words.contiguous().view(torch.uint8).view(*words.shape, 4)
        scale, least = (half.repeat_interleave(4, 0) for half in _halves(blocks.supers[:, rows]))
        scale, least = scale[..., None], least[..., None]  # one for each word, of two groups
        if layout.scales == 1:
            own, addend = scale * eight[..., :2].float(), least * eight[..., 2:].float()
            own, addend = (part.transpose(1, 2).flatten(0, 1)[..., None] for part in (own, addend))
            numbers = own * numbers - addend
        else:
            own = (scale * eight.view(torch.int8).float()).unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1)
            numbers = own.repeat_interleave(16, 2) * numbers
    return numbers.transpose(0, 1).flatten(1)[:, :width].contiguous()


def joined(matrices: list[Blocks]) -> Blocks:
    """Matrices of one kind and width, one below the other."""
    return Blocks(*(torch.cat(parts, 1) if parts[0].dim() > 1 else parts[0] for parts in zip(*matrices, strict=True)))


def _halves(words: Tensor) -> tuple[Tensor, Tensor]:
    lower, upper = words.contiguous().view(torch.float16).view(*words.shape, 2).float().unbind(-1)
    return lower, upper


def _word(*parts: Tensor) -> Tensor:
    """Parts [..., bytes] uint8 as one int32 each [...]."""
    return torch.cat(parts, -1).contiguous().view(torch.int32)[..., 0]


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] -> [..., 2 n]: all lower halves, then all upper ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _plain(blocks: Tensor, *, addend: bool, fifth: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 32: scale, perhaps an addend, perhaps a fifth bit of each quant, quants."""
    scale, rest = blocks[..., :2], blocks[..., 2:]
    least, rest = (rest[..., :2], rest[..., 2:]) if addend else (torch.zeros_like(scale), rest)
    quants = _nibbles(rest[..., 4:] if fifth else rest)
    if fifth:
        places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
        quants |= ((rest[..., :4, None] >> places) & 1).flatten(-2) << 4
    return quants, _word(scale, least), blocks.new_empty(0, dtype=torch.int32)


def _bytes(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = blocks[..., :2]
    return blocks[..., 2:], _word(scale, torch.zeros_like(scale)), blocks.new_empty(0, dtype=torch.int32)


def _six_bits(blocks: Tensor, *, fifth: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 256: two scales of scales, eight scales and addends of 6 bits, perhaps a fifth bit, quants."""
    packed = blocks[..., 4:16]
    lower, addends, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([lower & 63, (rest & 15) | ((lower >> 6) << 4)], -1)
    least = torch.cat([addends & 63, (rest >> 4) | ((addends >> 6) << 4)], -1)
    words = torch.cat([scales.unflatten(-1, (4, 2)), least.unflatten(-1, (4, 2))], -1)
    quants = _nibbles(blocks[..., 48 if fifth else 16 :].unflatten(-1, (4, 32))).flatten(-2)
    if fifth:
        bits = [(blocks[..., 16:48] >> group) & 1 for group in range(8)]
        quants |= torch.cat(bits, -1) << 4
    return quants, words.contiguous().view(torch.int32)[..., 0], _word(blocks[..., :4])


def _six_bit_quants(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 256: 4 bits of quants, 2 bits of quants, sixteen scales of 8 bits, their scale."""
    lower = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))  # of each half 128
    upper = blocks[..., 128:192].unflatten(-1, (2, 32))
    upper = torch.cat([(upper >> (2 * place)) & 3 for place in range(4)], -1)
    words = blocks[..., 192:208].unflatten(-1, (4, 4)).contiguous().view(torch.int32)[..., 0]
    scale = blocks[..., 208:210]
    return (lower | upper << 4).flatten(-2), words, _word(scale, torch.zeros_like(scale))


def _floats(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 32: an exponent, quants."""
    exponents = F.pad(blocks[..., 0], (0, -blocks.shape[1] % 4))
    return _nibbles(blocks[..., 1:]), _word(exponents.unflatten(1, (-1, 4))), blocks.new_empty(0, dtype=torch.int32)


def _zeroed(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of columns that share them a scale (float16), a zero (int16), and quants."""
    return _nibbles(blocks[..., 4:]), _word(blocks[..., :4]), blocks.new_empty(0, dtype=torch.int32)


_PARTS = {
    "Q4_0": lambda blocks: _plain(blocks, addend=False, fifth=False),
    "Q4_1": lambda blocks: _plain(blocks, addend=True, fifth=False),
    "Q5_0": lambda blocks: _plain(blocks, addend=False, fifth=True),
    "Q5_1": lambda blocks: _plain(blocks, addend=True, fifth=True),
    "Q8_0": _bytes,
    "Q4_K": lambda blocks: _six_bits(blocks, fifth=False),
    "Q5_K": lambda blocks: _six_bits(blocks, fifth=True),
    "Q6_K": _six_bit_quants,
    "MXFP4": _floats,
    **dict.fromkeys(("W4_32", "W4_64", "W4_128"), _zeroed),
}
