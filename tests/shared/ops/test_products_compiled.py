"""The Triton kernels of products and norms, compiled for GPUs that are not here: nothing spills, all that a
multiprocessor has is enough, tiles of all widths multiply by one family of instructions, and nothing is contracted."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.ops.blocks import LAYOUTS
from shared.ops.product_tiles import ProductTiles
from shared.ops.products import ADDED, norm_warps

triton = pytest.importorskip("triton", reason="Triton has no wheel for this system")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from shared.ops import product_kernel  # noqa: E402
from tests.shared.ops.test_paged_compiled import FAMILIES, NAMES, SHARED, stack_bytes  # noqa: E402

# Arguments whose multiples of 16 let the kernels read 16 bytes at once.
SIZES = ("num_rows", "all_rows", "width", "x_token")
COUNTS = (16, 64, 256)


def compiled(
    kernel: str, constants: dict[str, Any], types: dict[str, str], capability: int, options: dict[str, Any]
) -> Any:
    function = getattr(product_kernel, kernel)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(function.arg_names)
        if signature[name].startswith("*") or name in SIZES
    }
    return triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=constants, attrs=even),
        target=GPUTarget("cuda", capability, 32),
        options={**options, **product_kernel.OPTIONS},
    )


def multiplies(
    kind: str, dtype: torch.dtype, capability: int, count: int, folder: Path, *, choices: int = 0, biased: bool = True
) -> set[str]:
    """Compiles a product of so many tokens. The instructions that multiply in it. `choices`: as of the kernel."""
    tiles = ProductTiles(4096, 4096, LAYOUTS.get(kind), dtype, capability)
    element = "*" + NAMES[dtype]
    held = dict.fromkeys(("weight", "high"), "*u8") | dict.fromkeys(("scales", "supers"), "*i32")
    types = dict.fromkeys(("x", "bias", "out", "weight", "high", "scales", "supers"), element)
    types |= (held if kind else {}) | {"parts": "*fp32"}
    types |= dict.fromkeys(("places", "tiles"), "*i32" if choices else element)
    constants = tiles.constants(count, biased) | {"CHOICES": choices}
    made = compiled("multiply", constants, types, capability, tiles.options(count))
    assert stack_bytes(made.asm["cubin"], folder) == [0]
    assert made.metadata.shared <= SHARED[capability]
    code = made.asm["ptx"]
    if tiles.multiplies:
        assert "fma.rn.f32" not in code
    return set(re.findall(r"\b(mma\.sync|wgmma|tcgen05\.mma)(?=[._])", code))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", ["", "Q4_K", "W4_128"])
def test_an_8b_models_products_are_compiled_for_gpus_that_are_not_here(
    kind: str, capability: int, tmp_path: Path
) -> None:
    for count in COUNTS:
        assert multiplies(kind, torch.bfloat16, capability, count, tmp_path) == FAMILIES[capability]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("kind", ["", "Q4_K"])
def test_products_of_experts_are_compiled_for_gpus_that_are_not_here(
    kind: str, capability: int, tmp_path: Path
) -> None:
    for count, biased in ((16, False), (64, False), (256, False), (256, not kind)):
        found = multiplies(kind, torch.bfloat16, capability, count, tmp_path, choices=8, biased=biased)
        assert found == FAMILIES[capability]


# The bytes and bits that layouts differ by; the others have the code of one of these. What reads them is the same for
# all GPUs: each layout is compiled for two families of instructions, and the extremes for all.
COMPILED = [
    (capability, kind)
    for capability in SHARED
    for kind in ("", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "W4_64", "W4_128", "MXFP4")
    if capability in (80, 90) or kind in ("", "Q5_0", "Q4_K", "Q6_K", "W4_128")
]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("capability", "kind"), COMPILED)
def test_all_products_are_compiled_for_all_gpus(capability: int, kind: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if capability >= 80 else torch.float16
    found = [multiplies(kind, dtype, capability, count, tmp_path) for count in COUNTS]
    assert found == [FAMILIES[capability]] * len(COUNTS)
    if not kind:
        assert multiplies(kind, torch.float32, capability, 16, tmp_path) == set()


def test_norms_and_sums_of_pieces_are_compiled(tmp_path: Path) -> None:
    for width in (128, 4096, 16384):
        types = dict.fromkeys(("x", "weight", "bias", "out"), "*bf16") | {"eps": "fp32", "offset": "fp32"}
        made = compiled("norm", {"D": width, "CENTRED": width == 128}, types, 90, {"num_warps": norm_warps(width)})
        assert stack_bytes(made.asm["cubin"], tmp_path) == [0]
    types = {"parts": "*fp32", "bias": "*bf16", "out": "*bf16"}
    made = compiled("add_pieces", {"PIECES": 4, "BIASED": True, "BLOCK": ADDED}, types, 90, {})
    assert "fma.rn.f32" not in made.asm["ptx"]
