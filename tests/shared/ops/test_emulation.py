"""The kernel sources run on the host under AddressSanitizer and UBSan.
Planted bugs show that errors would be caught."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.shared.ops.emulated_cases import CHECKS
from tests.shared.ops.emulation import Bug, EmulationError, compiled

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

# Each bug with the check that must catch it.
BUGS = {
    "draft_top, again": Bug(
        "a barrier dropped: the warps' sums are read before they are written",
        "include/device.cuh",
        "scratch[threadIdx.x / kWarp] = value;\n  __syncthreads();\n",
        "scratch[threadIdx.x / kWarp] = value;\n",
    ),
    "draft_top": Bug(
        "a collective that some lanes do not reach",
        "include/draft_top.cuh",
        "if (warp >= kTiles) return;",
        "if (warp >= kTiles || lane > end) return;",
    ),
    "draft_top, once more": Bug(
        "a barrier dropped: two warps add to the same rows",
        "include/matrix.cuh",
        "    __syncthreads();\n  }\n}",
        "  }\n  __syncthreads();\n}",
    ),
    "draft_top, rounded": Bug(
        "tokens rounded to float16",
        "include/matrix.cuh",
        "          multiply_add(sums[part][tile], row, low[half]);\n",
        "",
    ),
    "route": Bug(
        "no fence before the ticket",
        "include/device.cuh",
        "  __threadfence();\n  __syncthreads();\n  if (threadIdx.x == 0) *scratch",
        "  __syncthreads();\n  if (threadIdx.x == 0) *scratch",
    ),
    "route, again": Bug(
        "tickets that are not zero after",
        "include/device.cuh",
        "atomicInc(ticket, count - 1)",
        "atomicInc(ticket, 1000000u)",
    ),
    "slots": Bug(
        "a barrier dropped: the largest number of all warps is read before they have written theirs",
        "include/slots.cuh",
        "scratch[rank / kWarp] = number;\n    __syncthreads();\n",
        "scratch[rank / kWarp] = number;\n",
    ),
    "choose": Bug(
        "a barrier dropped: the warps' firsts are read before they are written",
        "include/choose.cuh",
        "shared.firsts[warp] = first;\n  __syncthreads();",
        "shared.firsts[warp] = first;",
    ),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, "Future[Path]"]:
    """The programs with the original kernels ("") and with each bug, compiled in parallel."""
    pool = ThreadPoolExecutor(2)
    sound = pool.submit(compiled, tmp_path_factory.mktemp("sound"))
    broken = {name: pool.submit(compiled, tmp_path_factory.mktemp("bug"), bug, "address") for name, bug in BUGS.items()}
    pool.shutdown(wait=False)
    return {"": sound, **broken}


@pytest.mark.parametrize("name", CHECKS)
def test_a_kernel_computes_its_reference_in_any_order_of_warps(name: str, programs: dict[str, "Future[Path]"]) -> None:
    CHECKS[name](programs[""].result())


@pytest.mark.parametrize("name", BUGS, ids=[bug.name for bug in BUGS.values()])
def test_a_planted_bug_is_caught(name: str, programs: dict[str, "Future[Path]"]) -> None:
    program = programs[name].result()
    with pytest.raises((AssertionError, EmulationError)):
        CHECKS[name.split(",")[0]](program)
