"""Names of dtypes, as settings, manifests and messages have them, and which of them matmuls may be rounded to."""

import torch

from shared.ops.cards import has_bfloat16


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def rounded_to(format_name: str) -> torch.dtype | None:
    """The dtype that inputs of matmuls with weights in this format may be rounded to: int8 for GGUF's blocks."""
    return {"float32": None, "float16": None, "bfloat16": torch.bfloat16}.get(format_name, torch.int8)


def sixteen_bits(device: torch.device) -> torch.dtype:
    """What a device computes in where nothing is named: bfloat16, but float16 on a GPU that lacks it."""
    return torch.bfloat16 if device.type != "cuda" or has_bfloat16(device) else torch.float16


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies matrices faster in bfloat16 than in float32: with AVX-512 BF16 or AMX, or with
    ARM64's BF16 (BFMMLA), as torch names them."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
