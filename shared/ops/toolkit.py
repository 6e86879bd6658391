"""NVIDIA's compiler and driver: what is installed, what fits what, and nvcc from PyPI where there is none."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.errors import PreconditionFailed

# The environment variable. "0" builds for the CPU only, even if nvcc is installed; "1" for GPUs too, or not at all.
SWITCH = "NEAP_BUILD_CUDA"
DRIVER = Path("/proc/driver/nvidia/version")
# The first driver for each major version of CUDA, since minor versions are compatible with each other
# (docs.nvidia.com/deploy/cuda-compatibility, read on 2026-11-28).
LEAST_DRIVERS = {13: 580, 12: 525}
NVCC_PLACES = ("nvcc", "/usr/local/cuda/bin/nvcc")
# What is fetched from PyPI, which has no nvcc of CUDA 12.
FETCHED = "13.0"
FETCH_DIR = Path(__file__).resolve().parents[2] / "build" / "cuda"


@dataclass(frozen=True)
class Toolkit:
    """`nvcc`: its path; `libraries`: the folder of libcudart_static.a; `cuda`: its version, such as "13.0"."""

    nvcc: str
    libraries: Path
    cuda: str


def driver_version() -> str | None:
    """The version of NVIDIA's driver on this machine, such as "580.65.06". None without one."""
    try:
        match = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", DRIVER.read_text())
    except OSError:
        return None
    return match[1] if match else None


def driver_problem(cuda: str) -> str:
    """Why this machine's driver does not run what is built for a version of CUDA. Empty if it does or there is none."""
    driver = driver_version()
    least = LEAST_DRIVERS.get(int(cuda.partition(".")[0]), 0)
    if driver is None or int(driver.partition(".")[0]) >= least:
        return ""
    return f"CUDA {cuda} needs NVIDIA's driver {least} or later, and this machine has {driver}"


def code_runs_on(architectures: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether code for architectures such as "8.0" or "12.0+PTX" runs on a GPU of this compute capability.

    Machine code runs on later GPUs of the same major version, PTX on all later ones, and code for "9.0a" on that one
    alone (CUDA C++ Programming Guide, Application Compatibility).
    """
    for item in architectures:
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        assert match is not None, item
        own = int(match[1]), int(match[2])
        if own == capability:
            return True
        if not match[3] and own < capability and (own[0] == capability[0] or match[4]):
            return True
    return False


def find_toolkit() -> Toolkit | None:
    """The nvcc of $CUDA_HOME, else the one on PATH, that of /usr/local/cuda, or the one that a build has fetched.
    None if there is none or SWITCH is "0".

    Raises `PreconditionFailed` if nvcc does not run or its runtime library is missing.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    names = [f"{home}/bin/nvcc"] if home else [*NVCC_PLACES, f"{_fetched_home()}/bin/nvcc"]
    nvcc = next((path for name in names if (path := shutil.which(name))), None)
    if nvcc is None:
        return None
    # nvcc's own path does not tell the folder, because it may be a wrapper or a link.
    dry = _said(nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null")
    top, release = re.search(r"^#\$ TOP=(.+)$", dry, re.MULTILINE), re.search(r"release (\d+\.\d+)", _said(nvcc, "-V"))
    if top is None or release is None:
        raise PreconditionFailed(f"{nvcc} does not run:\n{dry}", reason="NVCC_BROKEN")
    root = Path(top[1].strip())
    target = "sbsa-linux" if platform.machine() == "aarch64" else "x86_64-linux"
    for folder in (root / "lib64", root / "targets" / target / "lib", root / "lib"):
        if (folder / "libcudart_static.a").exists():
            return Toolkit(nvcc, folder, release[1])
    raise PreconditionFailed(
        f"no libcudart_static.a under {root}: install CUDA's runtime beside {nvcc}, or set {SWITCH}=0",
        reason="NO_CUDART",
    )


def wanted_toolkit() -> Toolkit | None:
    """The toolkit that a build on this machine uses: `find_toolkit`'s, else one that is fetched from PyPI if
    `why_no_toolkit` is empty. Raises as `find_toolkit`, and `PreconditionFailed` (NO_NVCC) if that fails."""
    found = find_toolkit()
    if found is not None or why_no_toolkit():
        return found
    problem = fetching_problem()
    if not problem:
        package = f"cuda-toolkit[cudart,nvcc]=={FETCHED}.*"
        print(f"there is no nvcc: fetching {package} from PyPI", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(FETCH_DIR), package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and (found := find_toolkit()) is not None:
            return found
        problem = f"{package} cannot be fetched from PyPI: {done.stderr.strip()}"
    raise PreconditionFailed(
        f"there is no nvcc: {problem}. Install the CUDA toolkit that fits the driver (docs/running.md), or set "
        f"{SWITCH}=0 to build for the CPU alone",
        reason="NO_NVCC",
    )


def fetching_problem() -> str:
    """Why the nvcc of PyPI is of no use here. Empty if it is."""
    if home := os.environ.get("CUDA_HOME"):
        return f"CUDA_HOME is {home}, which has no bin/nvcc"
    return driver_problem(FETCHED)


def why_no_toolkit() -> str:
    """Why a build on this machine needs no nvcc, if it finds none: nothing here could use its code. Else empty."""
    switch = os.environ.get(SWITCH)
    if switch == "0":
        return "it is switched off"
    if switch == "1":
        return ""
    if torch.version.cuda is None:
        return "there is no nvcc, and torch is built for the CPU"
    # Under WSL a driver gives its version elsewhere.
    has_driver = driver_version() is not None or torch.cuda.is_available()
    return "" if has_driver else "there is no nvcc, and no driver of NVIDIA"


def _fetched_home() -> Path:
    return FETCH_DIR / "nvidia" / f"cu{FETCHED.partition('.')[0]}"


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
