"""Random blocks of GGUF."""

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

# Of a block's bytes, where its float16 are.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def drawn_blocks(rows: int, width: int, kind: str) -> Tensor:
    """Blocks of a file [N, bytes per row]: any bits, with scales of usual size."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = torch.randint(0, 256, (rows, width // block, size), dtype=torch.uint8)
    for place in HALVES.get(kind, (0,)):
        raw[..., place : place + 2] = (0.01 * torch.randn(rows, width // block, 1)).half().view(torch.uint8)
    return raw.view(rows, -1)
