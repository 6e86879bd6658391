"""Every op in plain PyTorch: the specification of the kernels, against which they are tested.
Written for reading, not for speed."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.ops import NO_TOKEN


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight.T + bias -> [..., N], with the unpacked weight [N, K]."""
    return F.linear(x, weight.float(), bias)


def choose_packed(x: Tensor, weight: Tensor) -> Tensor:
    """See `shared.ops.choose_packed`, with the unpacked weight [N, K]."""
    return choose_greedy(packed_linear(x, weight))


def packed_gated_linear(x: Tensor, gate: Tensor, up: Tensor, activation: str, bias: Tensor | None = None) -> Tensor:
    """activation(x @ gate.T + bias[:N]) * (x @ up.T + bias[N:]) with unpacked weights [N, K]: x [..., K] -> [...,
    N]."""
    gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
    gated, raised = packed_linear(x, gate, gate_bias), packed_linear(x, up, up_bias)
    return activate(gated, activation) * (raised.clamp(-7, 7) + 1 if activation == "clamped_swish" else raised)


def activate(x: Tensor, activation: str) -> Tensor:
    """See `shared.ops.activate`."""
    if activation.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "clamped_swish":
        return x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7))
    return F.silu(x) if activation == "silu" else F.relu(x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean(x)) / deviation(x) * weight + bias over the last dimension (1607.06450)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


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


def contiguous_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_length: int,
    mask: Tensor | None = None,
    causal: bool = True,
    scaling: float = 1.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over the first `kv_length` positions -> [B, Q, Hq, Dv]. The result of a query that sees no key is 0."""
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
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :kv_length]
    return (weights @ values.float()).to(q.dtype).transpose(1, 2).contiguous()


def ragged_contiguous_attention(
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
    sinks: Tensor | None = None,
) -> Tensor:
    """Writes the new keys and values of all sequences to their tensors, then attends over them. -> [1, T, Hq, Dv]."""
    parts = [part.split_with_sizes(list(counts), 2) for part in (q, k, v)]
    out = []
    for key, value, base, mask, queries, new_k, new_v in zip(keys, values, bases, masks, *parts, strict=True):
        end, plain = base + queries.shape[2], mask.numel() == 0
        key[:, :, base:end], value[:, :, base:end] = new_k, new_v
        seen = None if plain else mask
        out.append(contiguous_attention(queries, key, value, end, seen, plain, scaling, softcap, sinks))
    return torch.cat(out, 1)


def choose_experts(
    x: Tensor, router: Tensor, chosen: int, normed: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `shared.ops.experts.choose_experts`. `router` [E, D] is not packed."""
    logits = packed_linear(x, router, bias)
    probabilities, index = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    shares = probabilities[:, :chosen]
    return logits, shares / shares.sum(-1, keepdim=True) if normed else shares, index[:, :chosen]


def experts(
    x: Tensor,
    index: Tensor,
    shares: Tensor,
    matrices: Sequence[Tensor],
    activation: str,
    inner_bias: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """See `shared.ops.experts.experts`. `matrices`: gate, up and down of each expert, not packed. Biases as of
    `expert_table`."""
    gates, ups, downs = matrices[::3], matrices[1::3], matrices[2::3]
    out = torch.zeros_like(x)
    for token, (numbers, own) in enumerate(zip(index.tolist(), shares, strict=True)):
        for number, share in zip(numbers, own, strict=True):
            if number < len(gates):
                own_bias = None if inner_bias is None else inner_bias[number]
                inner = packed_gated_linear(x[token], gates[number], ups[number], activation, own_bias)
                out[token] += packed_linear(inner, downs[number], None if bias is None else bias[number]) * share
    return out


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    table_indices: Tensor,
    positions: Tensor,
    scaling: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Writes tokens to blocks, then attends -> [T, Hq, Dv]: see `shared.ops.paged.paged_attention`."""
    tokens, block_tokens, group = len(q), keys.shape[2], q.shape[1] // k.shape[1]
    places = zip(range(tokens), table_indices.tolist(), positions.tolist(), strict=True)
    real = [(token, block_tables[table], position) for token, table, position in places if position >= 0]
    for token, table, position in real:
        block, slot = table[position // block_tokens], position % block_tokens
        keys[block, :, slot], values[block, :, slot] = k[token], v[token]
    out = q.new_zeros(tokens, q.shape[1], v.shape[2])
    all_seen = torch.arange(max([-1, *positions.tolist()]) + 1, device=q.device)
    numbers, all_slots = all_seen // block_tokens, all_seen % block_tokens
    for token, table, position in real:
        seen = slice(max(0, position - window + 1) if window else 0, position + 1)
        blocks, slots = table[numbers[seen]], all_slots[seen]
        key = keys[blocks, :, slots].float().repeat_interleave(group, 1)  # [S, Hq, D]
        value = values[blocks, :, slots].float().repeat_interleave(group, 1)
        # Products and sums, because a matrix product may add in an order that depends on where its inputs are.
        scores = (q[token].float() * key).sum(-1) * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        shares = scores.softmax(0) if sinks is None else torch.cat([scores, sinks.float()[None]]).softmax(0)[:-1]
        out[token] = (shares[..., None] * value).sum(0)
    return out


def decoder_layers(
    x: Tensor,
    cos: Sequence[Tensor],
    sin: Sequence[Tensor],
    norms: Sequence[Tensor],
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bases: Sequence[int],
    counts: Sequence[int],
    masks: Sequence[Tensor],
    kinds: Sequence[int],
    stops: Sequence[int],
    num_layers: int,
    heads: int,
    intermediates: Sequence[int],
    *others: Any,
    reads_kv: Sequence[bool] = (),
    ends: Sequence[Tensor] = (),
    per_layer_inputs: Tensor | None = None,
) -> Tensor:
    """See `shared.ops.layer.decoder_layers`: the states after each of `stops` layers and after the last [K, B, Q, D].
    `matrices` are not packed."""
    states = []

    def part(tensors: Sequence[Tensor], layer: int) -> Sequence[Tensor]:
        count = len(tensors) // num_layers
        return tensors[layer * count : (layer + 1) * count]

    for layer in range(num_layers):
        of_layer = (part(each, layer) for each in (norms, matrices, biases, keys, values))
        kind = kinds[layer] if kinds else 0
        seen = masks[kind * len(bases) : (kind + 1) * len(bases)]
        arguments: tuple[Any, ...] = (*of_layer, bases, counts, seen, heads, *others)
        given = None if per_layer_inputs is None else per_layer_inputs[:, layer].view(*x.shape[:2], -1)
        of_end = [*part(ends, layer), given] if ends else []
        more: dict[str, Any] = {"reads_kv": bool(reads_kv) and bool(reads_kv[layer]), "end": of_end}
        x = _decoder_layer(x, cos[kind], sin[kind], *arguments, **more)
        if layer + 1 in (*stops, num_layers):
            states.append(x)
    return torch.stack(states)


def _decoder_layer(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: Sequence[Tensor],
    matrices: Sequence[Any],
    biases: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bases: Sequence[int],
    counts: Sequence[int],
    masks: Sequence[Tensor],
    heads: int,
    activation: str,
    eps: float,
    weight_offset: float,
    scaling: float,
    softcap: float | None = None,
    places: Sequence[int] = (),
    query_scale: float = 1.0,
    parallel_mlp: bool = False,
    experts_per_token: int = 0,
    norm_shares: bool = False,
    query_scales: Tensor | None = None,
    norm_values: bool = False,
    reads_kv: bool = False,
    end: Sequence[Any] = (),
) -> Tensor:
    """See `LayerWeights`. The matrices of experts are in place of their table."""
    batch, queries, _ = x.shape
    kv_heads, head_width, value_width = keys[0].shape[1], keys[0].shape[3], values[0].shape[3]
    own: list[Tensor | None] = [None if bias.numel() == 0 else bias for bias in biases] or [None] * 7
    *qkv_biases, out_bias, inner_bias, down_bias, sinks = own
    input_norm, mlp_norm, q_norm, k_norm, attended_norm, output_norm = norms
    *qkv, out, gate, up, down = matrices
    sizes = [(heads, head_width), (kv_heads, head_width), (kv_heads, value_width)]

    def normed(state: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() == 2:
            return layer_norm(state, weight[0], weight[1], eps)
        return rms_norm(state, weight, eps, weight_offset) if weight.numel() else state

    inner = normed(x, input_norm)
    made = [packed_linear(inner, *each) for each in zip(qkv, qkv_biases, strict=True) if each[0].numel()]
    if len(made) == 1 and not reads_kv:
        one_by_one = [0, head_width, heads * head_width, head_width, (heads + kv_heads) * head_width, value_width]
        starts = iter(places or one_by_one)
        heads_at = [(next(starts), next(starts)) for _ in sizes]
        made = [
            made[0][..., [at + step * head + i for head in range(count) for i in range(width)]]
            for (at, step), (count, width) in zip(heads_at, sizes, strict=True)
        ]
    q, *kv = (part.unflatten(-1, size).transpose(1, 2) for part, size in zip(made, sizes, strict=False))
    k, v = kv or (q[:, :0], q[:, :0])
    q, k = normed(q * query_scale, q_norm), normed(k, k_norm)
    v = rms_norm(v, v.new_ones(v.shape[-1]), eps, 0.0) if norm_values else v
    rotated = cos.shape[-1]
    turned = rotary(q[..., :rotated], k[..., :rotated], cos, sin)
    q, k = (torch.cat([part, x[..., rotated:]], -1) for part, x in zip(turned, (q, k), strict=True))
    if query_scales is not None:
        q = q * query_scales.view(-1, 1, queries, 1)
    # All tokens in one row, sequence after sequence, as `ragged_contiguous_attention` takes them.
    q, k, v = (part.transpose(0, 1).flatten(1, 2)[None] for part in (q, k, v))
    if reads_kv:  # they are written once more
        spans = [slice(base, base + count) for base, count in zip(bases, counts, strict=True)]
        k, v = (
            torch.cat([own[:, :, span].float() for own, span in zip(written, spans, strict=True)], 2)
            for written in (keys, values)
        )
    masks = list(masks) or [torch.empty(0, dtype=torch.bool)] * len(keys)
    attended = ragged_contiguous_attention(q, k, v, keys, values, bases, counts, masks, scaling, softcap, sinks)
    added = normed(packed_linear(attended.reshape(batch, queries, -1), out, out_bias), attended_norm)
    h = x + added
    inner = normed(x if parallel_mlp else h, mlp_norm if mlp_norm.numel() else input_norm)
    if experts_per_token:
        flat = inner.flatten(0, 1)
        _, shares, index = choose_experts(flat, up, experts_per_token, norm_shares, inner_bias)
        made_by_mlp = experts(flat, index, shares, gate, activation).view(inner.shape)
    elif up.numel():
        acted = packed_gated_linear(inner, gate, up, activation, inner_bias)
        made_by_mlp = packed_linear(acted, down, down_bias)
    else:
        made_by_mlp = packed_linear(activate(packed_linear(inner, gate, inner_bias), activation), down, down_bias)
    made_by_mlp = normed(made_by_mlp, output_norm)
    h = x + (added + made_by_mlp) if parallel_mlp else h + made_by_mlp
    if not end:
        return h
    given_gate, given_out, given_norm, scale, given = end
    if given_norm.numel():
        gated = activate(packed_linear(h, given_gate), activation) * given
        h = h + normed(packed_linear(gated, given_out), given_norm)
    return h * scale if scale.numel() else h


def norm(x: Tensor, eps: float) -> Tensor:
    """x [..., D] / rms(x) in float32. No gain."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def draft_top(x: Tensor, rows: Tensor, bias: Tensor | None = None, k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest logits [N, k], their rows [N, k] and logsumexp [N] of x [N, W] @ rows [V, W].T + bias."""
    logits = F.linear(x, rows.float(), bias)
    values, indices = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], indices[:, :k], logits.logsumexp(-1)


def route(
    x: Tensor,
    hidden: Tensor,
    bias: Tensor,
    output: Tensor,
    features: Tensor,
    skip: Tensor,
    top: Tensor,
    log_mass: Tensor,
    distance: Tensor,
    shift: float,
    eps: float,
    lowest: float,
    highest: float,
) -> Tensor:
    """Probability [N]: see `shared.ops.chains.route`."""
    likelihood = (top - log_mass[:, None]).exp()
    second = likelihood[:, 1] if top.shape[1] > 1 else torch.zeros_like(log_mass)
    scalars = torch.stack([top[:, 0] - log_mass, likelihood[:, 0] - second, (distance - 1).float() / 4], -1)
    inner = F.linear(norm(x, eps), hidden.float(), bias) + scalars @ features
    score = F.silu(inner) @ output + scalars @ skip + shift
    return score.sigmoid().clamp(lowest, highest)


def choose_greedy(logits: Tensor) -> Tensor:
    """Choices [T]: see `shared.ops.choose_greedy`."""
    largest = logits.argmax(-1)
    return torch.where(logits.gather(1, largest[:, None])[:, 0].isfinite(), largest, NO_TOKEN)


def choose_sampled(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Choices [T]: see `shared.ops.choose_sampled`."""
    choices = []
    for target, uniform in zip(probabilities.double(), uniforms.tolist(), strict=True):
        total = target.cumsum(0)
        if not 0 < total[-1] < torch.inf:
            choices.append(NO_TOKEN)
            continue
        point = torch.searchsorted(total, uniform * total[-1], right=True)
        choices.append(min(int(point), int(torch.searchsorted(total, total[-1]))))
    return torch.tensor(choices, dtype=torch.int64)


def register() -> None:
    """Registers what has kernels that are not of the library, which must be loaded: paged attention, and products and
    norms on a GPU. On a CPU, where only tests run it, paged attention is its reference."""
    from shared.ops import paged_on_gpu, products

    products.register()

    torch.library.register_kernel("neap::paged_attention", "cpu", paged_attention)
    torch.library.register_kernel("neap::paged_attention", "cuda", paged_on_gpu.paged_attention)
