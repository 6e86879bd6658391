"""Random blocks of GGUF, and of the groups of AWQ and GPTQ."""

import gguf
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

# Of a block's bytes, where its float16 are.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}

SPANS = {f"W4_{span}": span for span in (32, 64, 128)}


def drawn_blocks(rows: int, width: int, kind: str) -> Tensor:
    """Blocks of a file [N, bytes per row]: any bits, with scales of usual size."""
    block, size = block_sizes(kind)
    raw = torch.randint(0, 256, (rows, width // block, size), dtype=torch.uint8)
    if kind == "MXFP4":
        raw[..., 0] = torch.randint(115, 124, raw.shape[:2])
        return raw.view(rows, -1)
    for place in HALVES.get(kind, (0,)):
        raw[..., place : place + 2] = (0.01 * torch.randn(rows, width // block, 1)).half().view(torch.uint8)
    if kind in SPANS:
        raw[..., 2:4] = torch.randint(0, 17, (rows, width // block, 1), dtype=torch.int16).view(torch.uint8)
    return raw.view(rows, -1)


def block_sizes(kind: str) -> tuple[int, int]:
    """Columns and bytes of a block."""
    if kind in SPANS:
        return SPANS[kind], 4 + SPANS[kind] // 2
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


def numbers_of(raw: Tensor, kind: str) -> Tensor:
    """float32 [N, K], by GGUF's reference code, or of a scale, a zero, and quants whose first half is in lower bits."""
    if kind not in SPANS:
        return torch.from_numpy(gguf.dequantize(raw.numpy(), GGMLQuantizationType[kind]))
    blocks = raw.view(len(raw), -1, block_sizes(kind)[1])
    scale, zero = (blocks[..., i : i + 2].contiguous().view(dtype) for i, dtype in ((0, torch.half), (2, torch.int16)))
    quants = torch.cat([blocks[..., 4:] % 16, blocks[..., 4:] // 16], -1)
    return ((quants.int() - zero) * scale.float()).flatten(1)
