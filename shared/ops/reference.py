"""Every op in plain PyTorch: the specification that each backend's kernels are held to. Slow, and meant to be read."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

PANEL = 16


def pack_linear(weight: Tensor) -> Tensor:
    """weight [N, K] -> panels [ceil(N / 16), K, 16]; columns past N are 0."""
    rows, columns = weight.shape
    panels = (rows + PANEL - 1) // PANEL
    padded = F.pad(weight, (0, 0, 0, panels * PANEL - rows))
    return padded.view(panels, PANEL, columns).transpose(1, 2).contiguous()


def unpack_linear(packed: Tensor, out_features: int) -> Tensor:
    """The inverse of `pack_linear`: panels [P, K, 16] -> weight [N, K]."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:out_features].contiguous()


def packed_linear(
    x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None = None
) -> Tensor:
    """x [..., K] @ weight.T + bias -> [..., N]."""
    return F.linear(x, unpack_linear(packed, out_features), bias)


def pack_gated_linear(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [N, K] -> panels [2 * ceil(N / 16), K, 16], gate's and up's in turn."""
    return torch.stack([pack_linear(gate), pack_linear(up)], dim=1).flatten(0, 1)


def packed_gated_linear(
    x: Tensor, packed: Tensor, out_features: int, activation: str, bias: Tensor | None = None
) -> Tensor:
    """activation(x @ gate.T + bias[:N]) * (x @ up.T + bias[N:]): x [..., K] -> [..., N]."""
    gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
    gate = packed_linear(x, packed[0::2], out_features, gate_bias)
    up = packed_linear(x, packed[1::2], out_features, up_bias)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x / rms(x) * (weight + weight_offset) over the last dimension (1910.07467)."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (x.float() * scale).to(x.dtype) * (weight + weight_offset)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Half-rotation (2104.09864): q [B, Hq, Q, D], k [B, Hkv, Q, D], cos and sin [B or 1, Q, D]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    return rotate(q), rotate(k)


def slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_length: int,
    mask: Tensor | None = None,
    causal: bool = True,
    scaling: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Attention over the first `kv_length` slots -> [B, Q, Hq, Dv]. A row that sees no key is 0."""
    group = q.shape[1] // k.shape[1]
    keys = k[:, :, :kv_length].repeat_interleave(group, 1)
    values = v[:, :, :kv_length].repeat_interleave(group, 1)
    scores = q.float() @ keys.float().transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    queries = q.shape[2]
    visible = torch.ones(1, 1, queries, kv_length, dtype=torch.bool)
    if causal:
        visible = visible.tril(kv_length - queries)
    if mask is not None:
        visible = visible & mask
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
    return (weights @ values.float()).to(q.dtype).transpose(1, 2).contiguous()


def packed_slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bases: Sequence[int],
    counts: Sequence[int],
    masks: Sequence[Tensor],
    scaling: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Per segment: write its new keys and values to its slots, then attend over them. -> [1, T, Hq, Dv]."""
    out, start = [], 0
    for key, value, base, count, mask in zip(keys, values, bases, counts, masks, strict=True):
        own = slice(start, start + count)
        key[:, :, base : base + count] = k[:, :, own]
        value[:, :, base : base + count] = v[:, :, own]
        plain = mask.numel() == 0
        out.append(
            slot_attention(
                q[:, :, own],
                key,
                value,
                base + count,
                None if plain else mask,
                plain,
                scaling,
                softcap,
            )
        )
        start += count
    return torch.cat(out, 1)
