"""Attention over a cache of pages as a typed function: one op for a pass' tokens of any rows. CPU and CUDA.

Inference only. Raises `PreconditionFailed` where the library is not built and `RuntimeError`, which names the argument, for wrong
shapes, dtypes, devices or layouts. `reference` says in PyTorch what it computes.
"""

import torch
from torch import Tensor

from shared.ops import refuse_gradient
from shared.ops.library import load


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    rows: Tensor,
    positions: Tensor,
    scaling: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """Writes the keys and values of T tokens into their slots, then attends: -> [T, Hq, Dv] contiguous, of q's dtype.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], float32, float16 or bfloat16, of any strides but the last, which is 1.
    keys [P, Hkv, G, D] and values [P, Hkv, G, Dv], contiguous and of the same dtype: a pool of P pages of G slots. pages [R, M]
    int64: position p of row r is in page pages[r, p // G], slot p % G; entries that no query sees may be anything. rows and
    positions [T] int64: a token's row, and its position in it; negative: padding, nothing is written and the output is 0.

    A query sees positions [0, its own] of its row, or the last `window` of them, also those that this call writes; no two tokens
    may be at one position of one row. Query head h reads key head h // (Hq / Hkv). `scaling` defaults to D ** -0.5; with `softcap`,
    scores are softcap * tanh(scores / softcap). Sums are taken in float32. What a token gets has the same bits whatever else is
    in the pass.

    A row, position or page that does not exist raises on the CPU. On a GPU nobody may ask: such a token gets NaN.
    """
    load()
    refuse_gradient(q, k, v)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = torch.ops.neap.paged_attention.default(
        q, k, v, keys, values, pages, rows, positions, scale, softcap, window
    )
    return out
