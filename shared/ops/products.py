"""Products on a GPU whose bits do not depend on the other tokens of a pass, those of experts among them, norms, and the
choice of experts, as ops of torch. The kernels: `shared.ops.product_kernel`. On a CPU, where only tests run them,
products are their reference.

Inference only. They raise `RuntimeError`, which names the argument, for wrong shapes, dtypes or layouts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.ops import begin_call
from shared.ops.blocks import LAYOUTS, Blocks, widened
from shared.ops.paged_on_gpu import DTYPES, capability_of
from shared.ops.product_tiles import ProductTiles

# Numbers of a program that adds pieces.
ADDED = 256
# Products of the reference at once: half a megabyte, which a cache of the second level has.
REFERENCE_NUMBERS = 1 << 17
# The width of a row that is normed: it must fit a program's registers.
MOST_NORMED = 1 << 15


class Grouping(NamedTuple):
    """The choices of a pass, sorted by expert. `places` int32 [S] and `tiles` int32 [3, number] as of the kernel
    `multiply`, and choices of a tile at most."""

    places: Tensor
    tiles: Tensor
    size: int


def register() -> None:
    """Registers the ops with torch, once. The library must be loaded: norms are of its ops."""
    for name, arguments in {
        "invariant_linear": "Tensor x, Tensor weight, Tensor? bias",
        "blocks_linear": "Tensor x, Tensor low, Tensor high, Tensor scales, Tensor supers, Tensor? bias, str kind",
        "expert_linear": "Tensor x, Tensor[] held, Tensor? bias, Tensor index, Tensor places, Tensor tiles, int size, "
        "int rows, str kind",
    }.items():
        torch.library.define(f"neap::{name}", f"({arguments}) -> Tensor")
    torch.library.define("neap::largest_shares", "(Tensor logits, int chosen, bool normed) -> (Tensor, Tensor)")
    for device in ("cpu", "cuda"):
        torch.library.register_kernel("neap::largest_shares", device, _largest_shares)
    torch.library.register_fake("neap::largest_shares", _shares_like)
    torch.library.register_kernel("neap::expert_linear", "cpu", reference_experts)
    torch.library.register_kernel("neap::expert_linear", "cuda", _experts_on_gpu)
    torch.library.register_fake(
        "neap::expert_linear", lambda x, held, bias, index, *others: x.new_empty(index.numel(), others[3])
    )
    torch.library.register_kernel("neap::invariant_linear", "cpu", reference_linear)
    torch.library.register_kernel("neap::invariant_linear", "cuda", _linear_on_gpu)
    torch.library.register_kernel("neap::blocks_linear", "cpu", _reference_blocks)
    torch.library.register_kernel("neap::blocks_linear", "cuda", _blocks_on_gpu)
    torch.library.register_fake("neap::invariant_linear", lambda x, weight, bias: _new(x, weight.shape[0]))
    torch.library.register_fake("neap::blocks_linear", lambda x, low, *others: _new(x, low.shape[1]))
    torch.library.register_kernel("neap::rms_norm", "cuda", _rms_norm)
    torch.library.register_kernel("neap::layer_norm", "cuda", _layer_norm)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K], contiguous, plus bias [N] -> [..., N]: float32, float16 or bfloat16, all of one
    dtype. Sums are in float32."""
    begin_call(x, bias)
    out: Tensor = torch.ops.neap.invariant_linear.default(x, weight, bias)
    return out


def blocks_linear(x: Tensor, blocks: Blocks, kind: str, bias: Tensor | None = None) -> Tensor:
    """As `invariant_linear`, with a matrix in blocks of a kind of `LAYOUTS` such as "Q4_K": their numbers, rounded to
    x's dtype."""
    begin_call(x, bias)
    out: Tensor = torch.ops.neap.blocks_linear.default(x, *blocks, bias, kind)
    return out


def grouped(index: Tensor, num_experts: int, size: int) -> Grouping:
    """Of the experts of each token, int64 [T, k], in tiles of at most `size` choices. Nothing waits for the device.
    Numbers beyond the last expert are in no tile."""
    chosen, places = index.flatten().sort(stable=True)
    # Where each expert's choices begin, and where its tiles end.
    edges = torch.searchsorted(chosen, torch.arange(num_experts + 1, device=index.device))
    counts = (edges.diff() + (size - 1)) // size
    ends = counts.cumsum(0)
    tile = torch.arange(-(-len(chosen) // size) + min(num_experts, len(chosen)), device=index.device)
    expert = torch.searchsorted(ends, tile, right=True).clamp(max=num_experts - 1)
    first = edges[expert] + (tile - ends[expert] + counts[expert]) * size
    rows = (edges[expert + 1] - first).clamp(0, size)
    return Grouping(places.int(), torch.stack([expert, first, rows]).int(), size)


def expert_linear(
    x: Tensor, held: Sequence[Tensor], index: Tensor, grouping: Grouping, rows: int, kind: str = "",
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Row p // (S / R) of x [R, K] times the matrix of expert p of `index` [T, k], which has S numbers, plus its row of
    `bias` [E, N] -> [S, N]. The experts' matrices [N, K], N `rows`, lie one below the other in `held`: one tensor of
    x's dtype, contiguous, or `Blocks` of a kind. `grouping`: of `index`."""
    begin_call(x, bias)
    out: Tensor = torch.ops.neap.expert_linear.default(x, list(held), bias, index, *grouping, rows, kind)
    return out


def largest_shares(logits: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    """The shares float32 and numbers of each token's `chosen` experts of logits [T, E], as `choose_experts` gives them
    (`shared.ops.experts`). An op of its own, because a compiler sums a row otherwise for another number of rows."""
    shares, index = torch.ops.neap.largest_shares.default(logits, chosen, normed)
    return shares, index


def _largest_shares(logits: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    shares, index = F.softmax(logits.float(), -1).topk(chosen, dim=-1)
    return shares / shares.sum(-1, keepdim=True) if normed else shares, index


def _shares_like(logits: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    shape = len(logits), chosen
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each number is a sum of its own, so company does not matter."""
    check(x, weight.shape[-1], weight.shape[0], bias)
    _check_weight(x, weight)
    wide, rows = weight.float(), x.reshape(-1, x.shape[-1]).float()
    parts = rows.split(max(1, REFERENCE_NUMBERS // wide.numel()))
    out = torch.cat([(wide * part[:, None]).sum(-1) for part in parts])
    out = out if bias is None else out + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], -1)


def _reference_blocks(
    x: Tensor, low: Tensor, high: Tensor, scales: Tensor, supers: Tensor, bias: Tensor | None, kind: str
) -> Tensor:
    blocks = Blocks(low, high, scales, supers)
    check_blocks(x, blocks, kind, bias)
    return reference_linear(x, widened(blocks, kind, x.shape[-1]).to(x.dtype), bias)


def reference_experts(
    x: Tensor, held: list[Tensor], bias: Tensor | None, index: Tensor, places: Tensor, tiles: Tensor, size: int,
    rows: int, kind: str,
) -> Tensor:  # fmt: skip
    """Reads `index` alone: expert after expert, so that one matrix is wide at a time."""
    _check_experts(x, held, bias, index, Grouping(places, tiles, size), rows, kind)
    chosen, width = index.flatten(), x.shape[1]
    out = x.new_zeros(len(chosen), rows)
    for expert in chosen.unique().tolist():
        own, at = slice(expert * rows, (expert + 1) * rows), (chosen == expert).nonzero()[:, 0]
        weight = widened(Blocks(*held), kind, width, own).to(x.dtype) if kind else held[0].view(-1, width)[own]
        own_bias = None if bias is None else bias[expert]
        out[at] = reference_linear(x[at // (len(chosen) // len(x))], weight, own_bias)
    return out


def _check_experts(
    x: Tensor, held: list[Tensor], bias: Tensor | None, index: Tensor, grouping: Grouping, rows: int, kind: str
) -> Tensor | Blocks:
    """The matrices, one below the other."""
    _demand(x.dim() == 2, "x must be [R, K]")
    count = index.numel()
    _demand(index.dtype == torch.int64 and count % max(len(x), 1) == 0, "index must be int64 [T, k], times rows of x")
    fits = grouping.places.shape == (count,) and grouping.places.dtype == grouping.tiles.dtype == torch.int32
    _demand(fits and grouping.tiles.dim() == 2, "grouping must be that of index")
    if kind:
        blocks = Blocks(*held)
        check_blocks(x, blocks, kind, None)
        _demand(blocks.rows % rows == 0, f"{blocks.rows} rows are not those of experts of {rows}")
        found: Tensor | Blocks = blocks
    else:
        weight = held[0]
        fits = weight.dim() == 3 and weight.shape[1] == rows
        _demand(fits, f"held has shape {list(weight.shape)}, want [E, {rows}, K]")
        found = weight.view(-1, weight.shape[-1])
        _check_weight(x, found)
        check(x, weight.shape[-1], rows, None)
    if bias is not None:
        shape = [(found.rows if isinstance(found, Blocks) else len(found)) // rows, rows]
        fits = list(bias.shape) == shape and bias.dtype == x.dtype and bias.is_contiguous()
        _demand(fits, f"bias must be {x.dtype} {shape} and contiguous")
    return found


def check(x: Tensor, width: int, rows: int, bias: Tensor | None) -> None:
    _demand(x.dtype in DTYPES, "x must be float32, float16 or bfloat16")
    _demand(x.dim() > 0 and x.shape[-1] == width > 0, f"x has shape {list(x.shape)}, want [..., {width}]")
    if bias is not None:
        _demand(bias.shape == (rows,) and bias.dtype == x.dtype, f"bias must be {x.dtype} [{rows}]")


def check_blocks(x: Tensor, blocks: Blocks, kind: str, bias: Tensor | None) -> None:
    _demand(kind in LAYOUTS, f"kind is {kind!r}, want one of {', '.join(LAYOUTS)}")
    _demand(blocks.low.dim() == 3, f"low has shape {list(blocks.low.shape)}, want [any, any, 32]")
    layout, width, rows = LAYOUTS[kind], x.shape[-1], blocks.rows
    _demand(width % layout.block == 0, f"x has shape {list(x.shape)}, and blocks have {layout.block} columns")
    check(x, width, rows, bias)
    groups = -(-width // layout.step) * layout.step // 32
    shapes = {
        "low": [groups * layout.bits // 8, rows, 32],
        "high": [groups * layout.high // 8, rows, 32] if layout.high else [0],
        "scales": [groups * 32 // layout.span, rows],
        "supers": [width // 256, rows] if layout.has_supers else [0],
    }
    for (name, wanted), tensor in zip(shapes.items(), blocks, strict=True):
        _demand(list(tensor.shape) == wanted, f"{name} has shape {list(tensor.shape)}, want {wanted}")
        dtype = torch.uint8 if name in ("low", "high") else torch.int32
        _demand(tensor.dtype == dtype and tensor.is_contiguous(), f"{name} must be {dtype} and contiguous")


def multiplied(
    x: Tensor,
    weight: Tensor | Blocks,
    kind: str,
    bias: Tensor | None,
    capability: int,
    *,
    grouping: Grouping | None = None,
    num_rows: int | None = None,
    split: bool | None = None,
    tokens: int | None = None,
    kernels: Any = None,
) -> Tensor:
    """Launches the kernels for a device of this compute capability. `grouping`: of experts, with the rows of each, as
    in `expert_linear`. `split` and `tokens`: whether pieces of K are programs of their own, which those of experts with
    biases never are, and the tokens of a tile, which change no bit. None: as is fastest."""
    if kernels is None:
        from shared.ops import product_kernel as kernels
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    count, width = rows.shape
    all_rows = weight.rows if isinstance(weight, Blocks) else len(weight)
    num_rows, shape = num_rows or all_rows, x.shape[:-1]
    choices, places, tiles_of = 0, rows, rows
    if grouping is not None:
        places, tiles_of, tokens = grouping
        choices = len(places) // max(count, 1)
        count, shape = len(places), places.shape
    out = x.new_empty(count, num_rows)
    if not count:
        return out.view(*shape, num_rows)
    tiles = ProductTiles(num_rows, width, LAYOUTS.get(kind), x.dtype, capability)
    size = tokens or count
    constants = tiles.constants(size, bias is not None) | {"CHOICES": choices}
    constants["SPLIT"] = (tiles.splits(count) if split is None else split) and (bias is None or grouping is None)
    _demand(grouping is None or constants["BT"] >= grouping.size, f"tiles of experts have {constants['BT']} choices")
    pieces, splits = constants["PIECES"], constants["SPLIT"]
    parts = x.new_empty(pieces * count * num_rows if splits else 1, dtype=torch.float32)
    held = weight if isinstance(weight, Blocks) else Blocks(weight, weight, weight, weight)
    num_tiles = -(-count // constants["BT"]) if grouping is None else tiles_of.shape[1]
    grid = num_tiles, -(-num_rows // constants["BN"]), pieces if splits else 1
    kernels.multiply[grid](
        rows, *held, x if bias is None else bias, out, parts, places, tiles_of, count, num_rows, all_rows, width,
        rows.stride(0),
        **constants, **tiles.options(size), **kernels.OPTIONS,
    )  # fmt: skip
    if splits:
        kernels.add_pieces[(-(-out.numel() // ADDED),)](
            parts, x if bias is None else bias, out, out.numel(), num_rows, PIECES=pieces, BIASED=bias is not None,
            BLOCK=ADDED, **kernels.OPTIONS,
        )  # fmt: skip
    return out.view(*shape, num_rows)


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float, *, kernels: Any = None) -> Tensor:
    """The RMS norm, or with a bias the layer norm, of rows x [..., D]."""
    if kernels is None:
        from shared.ops import product_kernel as kernels
    width = weight.shape[0]
    _demand(x.dtype in DTYPES, "x must be float32, float16 or bfloat16")
    _demand(x.dim() > 0 and x.shape[-1] == width, f"x has shape {list(x.shape)}, want [..., {width}]")
    _demand(0 < width <= MOST_NORMED, f"rows of {width} are too wide, or empty")
    rows = x.contiguous()
    out = torch.empty_like(rows)
    if rows.numel():
        block = 1 << (width - 1).bit_length()
        kernels.norm[(rows.numel() // width,)](
            rows, weight.contiguous(), weight if bias is None else bias.contiguous(), out, width, eps, offset, D=block,
            CENTRED=bias is not None, num_warps=norm_warps(width), **kernels.OPTIONS,
        )  # fmt: skip
    return out


def norm_warps(width: int) -> int:
    return min(16, max(1, width // 512))


def _linear_on_gpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    check(x, weight.shape[-1], weight.shape[0], bias)
    _check_weight(x, weight)
    return multiplied(x, weight, "", bias, capability_of(x.device))


def _blocks_on_gpu(
    x: Tensor, low: Tensor, high: Tensor, scales: Tensor, supers: Tensor, bias: Tensor | None, kind: str
) -> Tensor:
    blocks = Blocks(low, high, scales, supers)
    check_blocks(x, blocks, kind, bias)
    return multiplied(x, blocks, kind, bias, capability_of(x.device))


def _experts_on_gpu(
    x: Tensor, held: list[Tensor], bias: Tensor | None, index: Tensor, places: Tensor, tiles: Tensor, size: int,
    rows: int, kind: str,
) -> Tensor:  # fmt: skip
    grouping = Grouping(places, tiles, size)
    weight = _check_experts(x, held, bias, index, grouping, rows, kind)
    return multiplied(x, weight, kind, bias, capability_of(x.device), grouping=grouping, num_rows=rows)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    return normed(x, weight, None, eps, weight_offset)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return normed(x, weight, bias, eps, 0.0)


def _check_weight(x: Tensor, weight: Tensor) -> None:
    fits = weight.dim() == 2 and weight.dtype == x.dtype and weight.is_contiguous()
    _demand(fits, f"weight must be {x.dtype} [N, K] and contiguous")


def _new(x: Tensor, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


def _demand(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"products: {what}")
