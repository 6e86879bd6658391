"""neap's kernels for the CPU, as typed functions, and the choice of a token for each row of scores, on CPU and CUDA.
They compute in float32; weights may be stored in other formats. `reference` specifies each of them in PyTorch. The
compiled library is found and loaded once per process, when an op is first needed.

Every op is *batch-invariant*: the bits of a token's result do not depend on what else is in the call, such as other
tokens, a longer cache or more threads. So a pass over eight tokens equals eight passes over one token, and drafts can
be verified without changing the output. The last bits may differ between instruction sets.

Inference only: no op has a gradient. All ops raise `PreconditionFailed` if the library is not built, `RuntimeError` for
tensors of the wrong shape, dtype, device or layout, and `ValueError` for inputs that require a gradient. The letters of
shapes are those of `shared.model`; `Hq` and `Hkv` are query and key heads, `K` and `N` inputs and outputs.
"""

import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import PreconditionFailed

# The choice of a row that is not finite. It is no index of a token.
NO_TOKEN = -1
LIBRARY = Path(__file__).resolve().parent / "_lib" / "libneap_ops.so"

# Instruction sets that give the bits of a narrower one in everything.
_ALIKE = {"dotprod": "neon", "amx": "avx512bf16"}

_lock = threading.Lock()
_loaded = False


def is_available() -> bool:
    """Whether the library is built. Does not load it."""
    return _loaded or LIBRARY.exists()


def runs_on(device_type: str) -> bool:
    """Whether the library is built and has kernels for `device_type`, "cpu" or "cuda".
    Loads the library if it is built."""
    is_built = _loaded or LIBRARY.exists()
    return is_built and device_type in ("cpu", "cuda") and _has_kernels(device_type)


@cache
def _has_kernels(device_type: str) -> bool:
    """As `runs_on`, for a library that is built. Cached, because it is called several times per step."""
    load()
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key("neap::draft_top", device_type.upper())
    return has_kernel


def begin_call(*inputs: Tensor | None) -> None:
    """What each op does first. Raises as `load`, and `ValueError` if an input requires a gradient, because the result
    would silently have none."""
    if not _loaded:
        load()
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs):
        raise ValueError("neap's kernels have no gradient: call them under torch.no_grad()")


def load() -> None:
    """Registers the ops and their fakes with torch. Later calls cost one comparison.

    Raises `PreconditionFailed` if the library is not built or does not load. The ops have no slower fallback: a caller
    that can work without the library decides that itself.
    """
    global _loaded
    if _loaded:
        return
    with _lock:
        if _loaded:
            return
        if not LIBRARY.exists():
            raise PreconditionFailed(
                f"neap's kernels are not built ({LIBRARY} is missing): run `make build-ops`", reason="OPS_NOT_BUILT"
            )
        from shared.ops import fakes, reference

        try:
            torch.ops.load_library(str(LIBRARY))
            fakes.register()
            reference.register()
        except (OSError, RuntimeError) as error:  # the second: a library of an older neap, which lacks an op
            raise PreconditionFailed(
                f"neap's kernels do not load, run `make build-ops`: {error}", reason="OPS_NOT_LOADABLE"
            ) from error
        _loaded = True


def pack_linear(weight: Tensor) -> Tensor:
    """weight [N, K] float32, float16 or bfloat16, any strides -> a packed matrix in the same dtype.

    A packed matrix is a uint8 vector that states its format and size itself (csrc/include/formats.h). It is a copy, so
    the caller may free `weight`.
    """
    begin_call()
    packed: Tensor = torch.ops.neap.pack_linear.default(weight.detach())
    return packed


def pack_blocks(blocks: Tensor, kind: str, in_features: int) -> Tensor:
    """Rows of GGUF blocks [N, bytes per row] uint8 of one type, such as "Q4_K" -> a packed matrix of the same
    numbers."""
    begin_call()
    packed: Tensor = torch.ops.neap.pack_blocks.default(blocks, kind, in_features)
    return packed


def round_inputs_(packed: Tensor) -> None:
    """Makes matmuls with a packed matrix round their inputs from now on: to bfloat16 if the weights are bfloat16, as
    Hugging Face does for such a model, and to 8 bits, 32 inputs sharing a scale, if they are GGUF's blocks, as
    llama.cpp does.

    Sums of scaled products stay in float32. A gated matmul rounds only if both of its matrices ask for the same. Raises
    `RuntimeError` for a matrix in float32 or float16.
    """
    begin_call()
    torch.ops.neap.round_inputs_.default(packed)


def unpack_linear(packed: Tensor) -> Tensor:
    """The float32 weight [N, K] of a packed matrix."""
    begin_call()
    weight: Tensor = torch.ops.neap.unpack_linear.default(packed)
    return weight


def packed_rows(packed: Tensor, indices: Tensor) -> Tensor:
    """Rows of a packed matrix: indices [...] int64 -> [..., K] float32.
    Raises `RuntimeError` for an index outside the matrix."""
    begin_call()
    rows: Tensor = torch.ops.neap.packed_rows.default(packed, indices)
    return rows


def packed_linear(x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None = None) -> Tensor:
    """x [..., K] float32 times the packed weight [N, K] plus bias [N] -> [..., N], `N = out_features`.

    The bits are those of the matmul with the weight dequantised to float32, unless `round_inputs_` was called for the
    matrix.
    """
    begin_call(x, bias)
    out: Tensor = torch.ops.neap.packed_linear.default(x, packed, out_features, bias)
    return out


def choose_packed(x: Tensor, packed: Tensor, out_features: int) -> Tensor:
    """`choose_greedy` of what `packed_linear` makes of x [T, K] without a bias: [T] int64. The products are compared
    where they are made, and nowhere written."""
    begin_call(x)
    tokens: Tensor = torch.ops.neap.choose_packed.default(x, packed, out_features)
    return tokens


def packed_gated_linear(
    x: Tensor, gate: Tensor, up: Tensor, out_features: int, activation: str, bias: Tensor | None = None
) -> Tensor:
    """activation(gate(x)) * up(x) in one pass over packed matrices [N, K]: x [..., K] float32 -> [..., N].

    `activation` as in `activate`; `bias` [2 * N] is gate's, then up's.
    """
    begin_call(x, bias)
    out: Tensor = torch.ops.neap.packed_gated_linear.default(x, gate, up, out_features, activation, bias)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x [..., D] float32 / rms(x) * (weight [D] + weight_offset) -> [..., D]. Gemma's offset is 1."""
    begin_call(x, weight)
    out: Tensor = torch.ops.neap.rms_norm.default(x, weight, eps, weight_offset)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x [..., D] float32 - mean(x)) / deviation(x) * weight [D] + bias [D] -> [..., D]."""
    begin_call(x, weight, bias)
    out: Tensor = torch.ops.neap.layer_norm.default(x, weight, bias, eps)
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    """x [...] float32 -> [...]. `activation` is "silu", "gelu_tanh", "gelu", "relu" or "clamped_swish": of x that is at
    most 7, x * sigmoid(1.702 x). Where it gates, this one also clamps `up` to [-7, 7] and adds one (gpt-oss)."""
    begin_call(x)
    out: Tensor = torch.ops.neap.activate.default(x, activation)
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates q [B, Hq, Q, D] and k [B, Hkv, Q, D] by cos, sin [B or 1, Q, D], halves paired. Float32, D even.

    The same bits as Hugging Face's `apply_rotary_pos_emb`; the results are contiguous.
    """
    begin_call(q, k)
    rotated: tuple[Tensor, Tensor] = torch.ops.neap.rotary.default(q, k, cos, sin)
    return rotated


def contiguous_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_length: int,
    mask: Tensor | None = None,
    causal: bool = True,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q over the first `kv_length` positions of a contiguous KV cache -> [B, Q, Hq, Dv] contiguous.

    q [B, Hq, Q, D] float32 of any strides; k [B, Hkv, S, D] and v [B, Hkv, S, Dv] float32, float16 or bfloat16 with a
    contiguous last dimension. 16-bit numbers are dequantised in registers: the bits are those of the same numbers in
    float32. `mask` [B or 1, 1, Q, kv_length] bool: True where a query sees the position. With `causal`, query j sees
    positions up to `kv_length - Q + j`. Both may be given. `scaling` defaults to D ** -0.5. `sinks` [Hq] float32
    contiguous: for each head, the score of a further key that every query sees, and whose value is 0. The result of a
    query that sees no position is 0. Hidden positions must hold finite numbers, too.
    """
    begin_call(q, k, v, sinks)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = torch.ops.neap.contiguous_attention.default(q, k, v, kv_length, mask, causal, scale, softcap, sinks)
    return out


def ragged_contiguous_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    bases: Sequence[int],
    counts: Sequence[int],
    masks: Sequence[Tensor],
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a ragged batch over contiguous KV caches: q [1, Hq, T, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv] ->
    [1, T, Hq, Dv].

    Sequence s has the next `counts[s]` of the T tokens, at positions from `bases[s]` on. Its new keys and values are
    written there in `keys[s]` [1, Hkv, S, D] and `values[s]` [1, Hkv, S, Dv], rounded to their dtype: float32, float16
    or bfloat16. Then its queries attend over its positions [0, bases[s] + counts[s]): causally if `masks[s]` is empty,
    else where `masks[s]` [1, 1, counts[s], bases[s] + counts[s]] bool is True. `sinks` as in `contiguous_attention`,
    whose bits per sequence the result has. It is contiguous.
    """
    begin_call(q, k, v, sinks)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = torch.ops.neap.ragged_contiguous_attention.default(
        q, k, v, keys, values, bases, counts, masks, scale, softcap, sinks
    )
    return out


def cpu_isa() -> str:
    """The instruction set in use, such as "avx2" or "i8mm": a name of `build.ISA_FLAGS` or `build.WITHIN`."""
    begin_call()
    name: str = torch.ops.neap.cpu_isa()
    return name


def cpu_bits() -> str:
    """The instruction set whose bits the one in use gives in everything: a narrower one's, or its own."""
    isa = cpu_isa()
    return _ALIKE.get(isa, isa)


def set_cpu_isa(name: str) -> None:
    """Sets the instruction set of the whole process; "auto" is the best one. For tests.
    Raises `RuntimeError` if it is unknown."""
    begin_call()
    torch.ops.neap.set_cpu_isa(name)


def choose_greedy(logits: Tensor) -> Tensor:
    """logits [T, V] float32, float16, bfloat16 or float64 -> [T] int64: the index of each row's largest score, the
    first one of equals.

    NO_TOKEN where a score is NaN, or the largest one is infinite.
    """
    begin_call(logits)
    tokens: Tensor = torch.ops.neap.choose_greedy.default(logits)
    return tokens


def choose_sampled(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The token [T] int64 of each row: where uniform number * sum of the probabilities falls in their running sum.

    probabilities [T, V] of the dtypes of `choose_greedy`, uniforms [T] float64 in [0, 1). A token depends only on its
    own row and uniform number: see docs/decisions/002. NO_TOKEN where the sum is not finite, or 0.
    """
    begin_call(probabilities)
    tokens: Tensor = torch.ops.neap.choose_sampled.default(probabilities, uniforms)
    return tokens
