"""Paged attention on a GPU: the launches of `shared.ops.paged_kernel`, or torch's own products where Triton is missing.

Both take part in CUDA graphs: what they launch follows from shapes alone, and nothing is read on the host.
"""

import importlib.util
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shared.ops.paged_tiles import Tiles, num_pieces

# Programs that share the list of work, for each multiprocessor: as many as fit beside one another.
PROGRAMS = 2
# Up to so many tiles of heads in a pass, pieces of keys are programs of their own: there are too few others.
MOST_SPLIT = 256
LOG2_E = math.log2(math.e)
# The width of a head: more does not fit what a multiprocessor shares.
MOST_WIDTH = 512
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Positions whose scores torch computes at once. More of all sequences' whole contexts would not fit into memory.
TORCH_KEYS = 512


@cache
def has_triton() -> bool:
    """Whether attention runs as a kernel of ours. Torch's builds for CUDA bring Triton along."""
    return importlib.util.find_spec("triton") is not None


@cache
def capability_of(device: torch.device) -> int:
    """Its compute capability, such as 90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _num_processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
    """The op on a GPU: see `shared.ops.paged.paged_attention`. Raises `RuntimeError`, which names the argument."""
    check(q, k, v, keys, values, block_tables, table_indices, positions)
    if softcap < 0 or window < 0:
        raise RuntimeError("paged_attention: softcap and window must be at least 0 (0: none)")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.dtype not in DTYPES or not sinks.is_contiguous()):
        raise RuntimeError(f"paged_attention: sinks must be contiguous floats [{q.shape[1]}]")
    places = block_tables, table_indices, positions
    if not has_triton():
        return by_torch(q, k, v, keys, values, *places, scaling, softcap, window, sinks)
    card = capability_of(q.device), _num_processors(q.device)
    return by_kernels(q, k, v, keys, values, *places, scaling, softcap, window, sinks, *card)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    table_indices: Tensor,
    positions: Tensor,
) -> None:
    """Raises `RuntimeError`, which names the argument, for shapes, dtypes, devices and layouts that no kernel takes."""

    def demand(condition: bool, what: str) -> None:
        if not condition:
            raise RuntimeError(f"paged_attention: {what}")

    demand(q.dim() == 3, f"q has shape {list(q.shape)}, want [any, any, any]")
    demand(q.dtype in DTYPES, "q must be float32, float16 or bfloat16")
    tokens, heads, width = q.shape
    demand(k.dim() == 3 and v.dim() == 3 and keys.dim() == 4, "k, v or keys has a wrong number of dimensions")
    kv_heads, value_width = k.shape[1], v.shape[2]
    num_blocks, block_tokens = keys.shape[0], keys.shape[2]
    named: dict[str, tuple[Tensor, list[int | None]]] = {
        "k": (k, [tokens, None, width]),
        "v": (v, [tokens, kv_heads, None]),
        "keys": (keys, [None, kv_heads, None, width]),
        "values": (values, [num_blocks, kv_heads, block_tokens, value_width]),
        "block_tables": (block_tables, [None, None]),
        "table_indices": (table_indices, [tokens]),
        "positions": (positions, [tokens]),
    }
    for name, (tensor, wanted) in named.items():
        sizes = list(tensor.shape)
        fits = len(sizes) == len(wanted) and all(want in (None, size) for size, want in zip(sizes, wanted, strict=True))
        written = ", ".join("any" if want is None else str(want) for want in wanted)
        demand(fits, f"{name} has shape {sizes}, want [{written}]")
        demand(tensor.device == q.device, f"{name} is on {tensor.device}, q on {q.device}")
        if name in ("k", "v", "keys", "values"):
            demand(tensor.dtype == q.dtype, f"{name} is of another dtype than q")
        else:
            demand(tensor.dtype == torch.int64, f"{name} must be int64")
        if name not in ("k", "v"):
            demand(tensor.is_contiguous(), f"{name} must be contiguous")
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        dense = not tensor.numel() or tensor.shape[2] == 1 or tensor.stride(2) == 1
        demand(dense, f"the last dimension of {name} must be contiguous")
    demand(
        kv_heads > 0 and heads > 0 and heads % max(kv_heads, 1) == 0,
        f"{heads} query heads cannot share {kv_heads} key heads",
    )
    demand(
        0 < max(width, value_width) <= MOST_WIDTH and min(width, value_width) > 0,
        f"heads of width {width} are too wide, or empty",
    )
    capacity = block_tokens * block_tables.shape[1]
    demand(0 < capacity < 1 << 24, f"block tables of {capacity} tokens are empty or too long")


def by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    table_indices: Tensor,
    positions: Tensor,
    scaling: float,
    softcap: float,
    window: int,
    sinks: Tensor | None,
    capability: int,
    num_processors: int,
    *,
    split: bool | None = None,
    kernels: Any = None,
) -> Tensor:
    """Launches the kernels for a device of this compute capability and so many multiprocessors. `split`: whether
    pieces of keys are programs of their own, which changes no bit; None: where there are too few others."""
    if kernels is None:
        from shared.ops import paged_kernel as kernels
    tokens, heads, width = q.shape
    kv_heads, value_width = v.shape[1:]
    out = q.new_empty(tokens, heads, value_width)
    if not tokens:
        return out
    num_blocks, block_tokens = keys.shape[0], keys.shape[2]
    num_tables, table_blocks = block_tables.shape
    tiles = Tiles(
        heads, kv_heads, width, value_width, block_tokens, q.dtype, softcap > 0, capability, sinks is not None
    )
    most = num_pieces(table_blocks * block_tokens)
    if split is None:
        split = most > 1 and tokens * tiles.head_tiles <= MOST_SPLIT
    num_entries = most if split else 1
    # How many entries there are, then these, and room for what a program writes at once.
    work = positions.new_empty(1 + tokens * num_entries, dtype=torch.int32)
    parts = q.new_empty(tokens * heads * num_entries * value_width if split else 1, dtype=torch.float32)
    marks = q.new_empty(tokens * heads * num_entries * 2 if split else 1, dtype=torch.float32)
    places = block_tables, table_indices, positions
    kernels.enter[(tokens,)](
        k, v, keys, values, out, *places, work, tokens, num_blocks, num_tables, table_blocks,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), window, **tiles.enter(split), **kernels.OPTIONS,
    )  # fmt: skip
    scale, cap = (scaling / softcap, softcap * LOG2_E) if softcap else (scaling * LOG2_E, 0.0)
    sunk = q if sinks is None else sinks  # the kernels take some tensor
    num_programs = min(tokens * num_entries, -(-PROGRAMS * num_processors // tiles.head_tiles))
    kernels.attend[(num_programs, tiles.head_tiles)](
        q, keys, values, sunk, out, parts, marks, *places, work, tokens, num_blocks, table_blocks, num_programs,
        num_entries, q.stride(0), q.stride(1), scale, cap, window, **tiles.attend(split),
        num_warps=tiles.warps, num_stages=tiles.stages, **kernels.OPTIONS,
    )  # fmt: skip
    if split:
        kernels.join[(tokens, heads)](
            sunk, out, parts, marks, table_indices, positions, num_tables, table_blocks, num_entries, window,
            **tiles.join, num_warps=1, **kernels.OPTIONS,
        )  # fmt: skip
    return out


def by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    table_indices: Tensor,
    positions: Tensor,
    scaling: float,
    softcap: float,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """The same by torch's products, over all positions that block tables have room for. Slow, but right."""
    num_blocks, kv_heads, block_tokens, _ = keys.shape
    num_tables, table_blocks = block_tables.shape
    capacity = block_tokens * table_blocks
    has_place = (positions >= 0) & (positions < capacity) & (table_indices >= 0) & (table_indices < num_tables)
    at = positions.where(has_place, 0)
    tables = block_tables[table_indices.where(has_place, 0)]  # [T, M]
    is_there = (tables >= 0) & (tables < num_blocks)
    block = tables.gather(1, (at // block_tokens)[:, None])[:, 0]
    writes = has_place & (block >= 0) & (block < num_blocks)
    _write(keys, k, block, at % block_tokens, writes)
    _write(values, v, block, at % block_tokens, writes)
    tokens, heads, width = q.shape
    query = q.float().view(tokens, kv_heads, heads // kv_heads, width)
    largest = query.new_full((tokens, kv_heads, heads // kv_heads, 1), -torch.inf)
    total, sums = torch.zeros_like(largest), query.new_zeros(*query.shape[:3], values.shape[3])
    if sinks is not None:
        largest, total = sinks.float().view(1, kv_heads, -1, 1).expand_as(largest), total + 1
    step = max(1, TORCH_KEYS // block_tokens)
    for begin in range(0, table_blocks, step):
        blocks, exists = tables[:, begin : begin + step], is_there[:, begin : begin + step]
        seen_at = torch.arange(begin * block_tokens, (begin + blocks.shape[1]) * block_tokens, device=q.device)
        seen = (seen_at <= at[:, None]) & ((at[:, None] - seen_at < window) if window else has_place[:, None])
        exists = exists.repeat_interleave(block_tokens, 1)

        def held(pool: Tensor, blocks: Tensor = blocks, shown: Tensor = seen & exists) -> Tensor:
            found = pool[blocks.clamp(0, num_blocks - 1)].transpose(1, 2).flatten(2, 3).float()  # [T, Hkv, S, D]
            return found.masked_fill(~shown[:, None, :, None], 0.0)

        scores = query @ held(keys).transpose(2, 3) * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~exists[:, None, None], torch.nan).masked_fill(~seen[:, None, None], -torch.inf)
        most = torch.maximum(largest, scores.amax(-1, keepdim=True))
        shift = most.masked_fill(most == -torch.inf, 0.0)
        weights, keep = (scores - shift).exp(), (largest - shift).exp()
        total = total * keep + weights.sum(-1, keepdim=True)
        sums = sums * keep + weights @ held(values)
        largest = most
    out = (sums / total).flatten(1, 2)
    nothing = torch.where(positions < 0, 0.0, torch.nan)[:, None, None]
    return out.where(has_place[:, None, None], nothing).to(q.dtype)


def _write(pool: Tensor, new: Tensor, block: Tensor, slot: Tensor, writes: Tensor) -> None:
    """pool[block, :, slot] = new [T, Hkv, D] where `writes` [T]. The others write what the first of these does, or if
    there is none, what is there: a choice of rows would have to wait for the device."""
    tokens = torch.arange(len(new), device=new.device)
    source = tokens.where(writes, writes.int().argmax())
    is_any = writes.any()
    block, slot = (place[source].where(is_any, 0) for place in (block, slot))
    pool[block, :, slot] = new[source].where(is_any, pool[0, :, 0])
