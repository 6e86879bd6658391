"""Which GPUs the compiled library has code for, and why it does not serve another."""

from typing import NamedTuple

import torch

from shared import ops
from shared.errors import PreconditionFailed
from shared.ops.toolkit import code_runs_on, driver_problem

# The first compute capability with arithmetic in bfloat16. Before (T4: 7.5) it is computed in float32, at its speed.
BFLOAT16_SINCE = (8, 0)


class CudaBuild(NamedTuple):
    """What nvcc built: `cuda`, its version, and `architectures` such as "8.0" or "12.0+PTX"."""

    cuda: str
    architectures: tuple[str, ...]


def cuda_build() -> CudaBuild | None:
    """The library's code for GPUs. None if it is built for the CPU alone. Raises as `ops.load`."""
    ops.load()
    cuda, _, listed = torch.ops.neap.cuda_build().partition(" ")
    return CudaBuild(cuda, tuple(listed.split(";"))) if cuda else None


def check_card(device: torch.device) -> None:
    """Raises as `ops.load`, and `PreconditionFailed` with the command that mends it if the library has no code for GPUs
    (OPS_NOT_BUILT) or for this one (OPS_NOT_FOR_GPU), or code that the driver is too old for (DRIVER_TOO_OLD)."""
    built = cuda_build()
    if built is None:
        # Without them requests would run one at a time, and nobody who pays for a GPU wants that.
        raise PreconditionFailed(
            "neap's kernels are not built for CUDA: run `NEAP_BUILD_CUDA=1 make build-ops`, which fetches nvcc from "
            "PyPI where there is none",
            reason="OPS_NOT_BUILT",
        )
    if problem := driver_problem(built.cuda):
        raise PreconditionFailed(
            f"neap's kernels do not run: {problem}. Install a newer driver, or run `make build-ops` with an nvcc of "
            "an older CUDA (docs/running.md)",
            reason="DRIVER_TOO_OLD",
        )
    major, minor = torch.cuda.get_device_capability(device)
    if not code_runs_on(built.architectures, (major, minor)):
        raise PreconditionFailed(
            f"neap's kernels are built for GPUs of {', '.join(built.architectures)}, and {device} has capability "
            f"{major}.{minor}: run `TORCH_CUDA_ARCH_LIST={major}.{minor} make build-ops`",
            reason="OPS_NOT_FOR_GPU",
        )


def has_bfloat16(device: torch.device) -> bool:
    """Whether a GPU has arithmetic in bfloat16."""
    return torch.cuda.get_device_capability(device) >= BFLOAT16_SINCE
