"""A fused head, its draft rows and its router as the native op of whole chains. CPU only."""

import gguf
import torch
from torch import Tensor

from shared import ops

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def packed_as(weight: Tensor, form: str) -> Tensor:
    """A matrix [N, K], packed in a format by its name in GGUF. K must divide into the format's blocks."""
    if form in DTYPES:
        return ops.pack_linear(weight.to(DTYPES[form]))
    kind = gguf.GGMLQuantizationType[form]
    blocks = gguf.quants.quantize(weight.float().numpy(), kind)
    return ops.pack_blocks(torch.from_numpy(blocks), form, weight.shape[1])
