"""The Triton kernels of paged attention, compiled for GPUs that are not here: nothing spills, all that a multiprocessor
has is enough, and no compiler contracts an addition."""

import re
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.ops.paged_tiles import Tiles

triton = pytest.importorskip("triton", reason="Triton has no wheel for this system")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from shared.ops import paged_kernel  # noqa: E402

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INTEGERS = ("block_tables", "table_indices", "positions")
# Arguments whose multiples of 16 let the kernels read 16 bytes at once.
STRIDES = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")
PRODUCT = r"(?:wgmma\.mma_async|mma\.sync)\S+"
# Bytes that a block may have of a multiprocessor's shared memory.
SHARED = {75: 64 << 10, 80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# What multiplies, by compute capability: one instruction's family for all passes.
FAMILIES = {75: set(), 80: {"mma.sync"}, 90: {"wgmma"}, 100: {"tcgen05.mma"}, 120: {"mma.sync"}}


@cache
def compiled(kernel: str, tiles: Tiles, split: bool) -> Any:
    function = getattr(paged_kernel, kernel)
    constants = tiles.join if kernel == "join" else getattr(tiles, kernel)(split)
    element = "*" + NAMES[tiles.dtype]
    known = dict.fromkeys(INTEGERS, "*i64") | {"work": "*i32", "parts": "*fp32", "marks": "*fp32"}
    known |= dict.fromkeys(("q", "k", "v", "keys", "values", "sinks", "out"), element) | {
        "scale": "fp32",
        "softcap": "fp32",
    }
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in function.arg_names}
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(function.arg_names)
        if signature[name].startswith("*") or name in STRIDES
    }
    options = {"attend": {"num_warps": tiles.warps, "num_stages": tiles.stages}, "join": {"num_warps": 1}}
    return triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=constants, attrs=even),
        target=GPUTarget("cuda", tiles.capability, 32),
        options={**options.get(kernel, {}), **paged_kernel.OPTIONS},
    )


def stack_bytes(binary: bytes, folder: Path) -> list[int]:
    """Of each kernel: more than none are registers that had no room."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    said = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True)
    return [int(size) for size in re.findall(r"STACK:(\d+)", said.stdout + said.stderr)]


def check(tiles: Tiles, split: bool, folder: Path) -> None:
    for kernel in ("enter", "attend", *(["join"] if split else [])):
        made = compiled(kernel, tiles, split)
        assert stack_bytes(made.asm["cubin"], folder) == [0]
        assert made.metadata.shared <= SHARED[tiles.capability]
        code = made.asm["ptx"]
        families = set(re.findall(r"\b(mma\.sync|wgmma|tcgen05\.mma)(?=[._])", code))
        if kernel == "attend" and tiles.multiplies:
            # Tiles of wide heads have fewer rows than Hopper's and Blackwell's own instructions take.
            assert families == (FAMILIES[tiles.capability] if tiles.rows == 64 else {"mma.sync"})
        else:
            assert not families
        if kernel != "attend" or tiles.multiplies:
            assert "fma.rn.f32" not in code


@pytest.mark.parametrize("capability", [80, 90])
def test_an_8b_models_attention_is_compiled_for_gpus_that_are_not_here(capability: int, tmp_path: Path) -> None:
    tiles = Tiles(32, 8, 128, 128, 16, torch.bfloat16, False, capability)
    for split in (False, True):
        check(tiles, split, tmp_path)
        check(replace(tiles, has_sinks=True), split, tmp_path)
    # Split or not, a product is summed by the same instructions.
    whole, split = (compiled("attend", tiles, split).asm["ptx"] for split in (False, True))
    wanted = set(re.findall(PRODUCT, whole))
    assert wanted
    assert set(re.findall(PRODUCT, split)) == wanted


# For Hopper all widths, and the least and the most of other formats' bytes; for the others the widths of most models
# and the widest, in the format that they compute in. All 75 take a quarter of an hour of one processor, and passed on
# 2026-11-28.
COMPILED = [
    *((90, width, torch.bfloat16) for width in (64, 80, 96, 128, 256)),
    *((90, 128, torch.float16), (90, 64, torch.float32), (90, 256, torch.float32)),
    *(
        (each, width, torch.float16 if each < 80 else torch.bfloat16)
        for each in (75, 80, 100, 120)
        for width in (128, 256)
    ),
]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("capability", "width", "dtype"), COMPILED)
def test_all_kernels_are_compiled_for_all_gpus(capability: int, width: int, dtype: torch.dtype, tmp_path: Path) -> None:
    tiles = Tiles(32, 8, width, width, 16, dtype, False, capability)
    for split in (False, True):
        check(replace(tiles, is_capped=split), split, tmp_path)
    # Models with sinks have heads of 64, and Turing has too few registers for sinks beside heads of 256.
    if width < 256:
        check(replace(tiles, has_sinks=True), False, tmp_path)


def test_what_spills_is_found(tmp_path: Path) -> None:
    """A tile that half as many threads multiply."""
    tiles = Tiles(32, 8, 128, 128, 16, torch.bfloat16, False, 90)
    constants, function = tiles.attend(False), paged_kernel.attend
    made = compiled("attend", tiles, False)
    signature = made.src.signature
    assert constants["BR"] == tiles.rows
    narrow = triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=constants, attrs=made.src.attrs),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "num_stages": 2, **paged_kernel.OPTIONS},
    )
    assert stack_bytes(narrow.asm["cubin"], tmp_path) != [0]
