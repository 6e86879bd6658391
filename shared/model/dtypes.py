"""Names of dtypes, as settings, manifests and messages have them."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
