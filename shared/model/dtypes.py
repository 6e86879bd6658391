"""Names of dtypes, as settings, manifests and messages have them, and which of them the processor is fast in."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies matrices faster in bfloat16 than in float32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
