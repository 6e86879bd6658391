"""Finds the CUDA toolkit that compiles the kernels, if there is one, and the GPU architectures to compile for."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.errors import InvalidInput, PreconditionFailed

# Every generation since Turing. The last one also as PTX, for later generations.
ARCHITECTURES = "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"
# The environment variable. "0" builds for the CPU only, even if nvcc is installed.
SWITCH = "NEAP_BUILD_CUDA"


@dataclass(frozen=True)
class Toolkit:
    """`nvcc`: its path; `libraries`: the folder of libcudart_static.a."""

    nvcc: str
    libraries: Path


def find_toolkit() -> Toolkit | None:
    """The nvcc of $CUDA_HOME, else the one on PATH, else that of /usr/local/cuda.
    None if there is none or SWITCH is "0".

    Raises `PreconditionFailed` if nvcc does not run or its runtime library is missing.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    names = [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    nvcc = next((path for name in names if (path := shutil.which(name))), None)
    if nvcc is None:
        return None
    # nvcc's own path does not tell the folder, because it may be a wrapper or a link.
    dry = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=False,
    )
    top = re.search(r"^#\$ TOP=(.+)$", dry.stderr, re.MULTILINE)
    if dry.returncode != 0 or top is None:
        raise PreconditionFailed(f"{nvcc} does not run:\n{dry.stderr}", reason="NVCC_BROKEN")
    root = Path(top[1].strip())
    for folder in (root / "lib64", root / "targets" / "x86_64-linux" / "lib", root / "lib"):
        if (folder / "libcudart_static.a").exists():
            return Toolkit(nvcc, folder)
    raise PreconditionFailed(
        f"no libcudart_static.a under {root}: install CUDA's runtime beside {nvcc}, or set {SWITCH}=0",
        reason="NO_CUDART",
    )


def wanted_architectures() -> str:
    """$TORCH_CUDA_ARCH_LIST, else the architectures of the GPUs in this machine, else ARCHITECTURES."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if listed:
        return listed
    if torch.cuda.is_available():
        present = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        return ";".join(f"{major}.{minor}" for major, minor in sorted(present))
    return ARCHITECTURES


def architecture_flags(listed: str) -> list[str]:
    """nvcc's flags for a list like "8.0;9.0+PTX". Spaces and commas separate, too.
    Raises `InvalidInput` for anything else."""
    flags = []
    for item in re.split(r"[;,\s]+", listed.strip()):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if match is None:
            raise InvalidInput(f"TORCH_CUDA_ARCH_LIST names {item!r}; it must look like 8.0 or 9.0+PTX")
        number = match[1] + match[2] + match[3]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags
