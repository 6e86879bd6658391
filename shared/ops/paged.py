"""Paged attention as a typed function: one op for a ragged batch of tokens of any sequences. On a GPU it runs as
`paged_on_gpu` says. On a CPU the op is its specification in `reference`, which is for tests.

Inference only. It raises `PreconditionFailed` if the library is not built, and on a GPU `RuntimeError`, which names the
argument, for wrong shapes, dtypes, devices or layouts.
"""

import torch
from torch import Tensor

from shared.ops import begin_call


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    table_indices: Tensor,
    positions: Tensor,
    scaling: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Writes the keys and values of T tokens to their blocks, then attends -> [T, Hq, Dv] contiguous, of q's dtype.

    q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv]: float32, float16 or bfloat16, with a contiguous last dimension. keys
    [P, Hkv, G, D] and values [P, Hkv, G, Dv]: contiguous, of the same dtype, a pool of P blocks of G tokens each.
    block_tables [R, M] int64: position p of sequence r is at index p % G of block block_tables[r, p // G]; entries that
    no query sees are ignored. table_indices and positions [T] int64: the row of block_tables that belongs to a token's
    sequence, and its position. A negative position is padding: nothing is written, and the result is 0.

    A query sees positions [0, its own] of its sequence, or the last `window` of them if `window` is not 0. That
    includes those written by this call. No two tokens may have the same place. Query head h reads key head h // (Hq /
    Hkv). `scaling` defaults to D ** -0.5. With `softcap`, scores are softcap * tanh(scores / softcap). `sinks` [Hq],
    contiguous: scores of a key more, whose value is zero. Sums are in float32. The bits of a token's result do not
    depend on the other tokens of the pass.

    The result of a token whose block table, position or block does not exist is NaN: a check would need a
    synchronisation.
    """
    begin_call(q, k, v)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = torch.ops.neap.paged_attention.default(
        q, k, v, keys, values, block_tables, table_indices, positions, scale, softcap, window, sinks
    )
    return out
