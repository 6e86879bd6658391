"""Checks of the machine: kernels, GPU, the compiler that torch.compile needs, versions."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from neap_engine.doctor.finding import Finding, missing
from neap_engine.version import installed_version
from shared import ops
from shared.configured_model import use_cpu_path
from shared.cpus import usable_cpus
from shared.errors import NeapError
from shared.model.load import check_device
from shared.ops import choose_greedy
from shared.ops.build import described
from shared.ops.cards import check_card, cuda_build, has_bfloat16
from shared.ops.toolkit import driver_problem, driver_version, find_toolkit

PACKAGES = ("torch", "transformers", "triton", "grpcio", "protobuf")


def versions() -> Finding:
    """The versions that a report of a fault should name."""
    facts: dict[str, str | None] = {
        "neap": installed_version(),
        "python": platform.python_version(),
        **{name: _version_of(name) for name in PACKAGES},
        "system": platform.platform(),
    }
    known = [f"{name} {value}" for name, value in facts.items() if value is not None]
    return Finding("versions", "ok", ", ".join(known), facts=facts)


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_kernels(path: str = "auto") -> Finding:
    """Loads the library and runs a kernel. Every device needs the library. `path`: that of the settings. Raises what
    `ops.load` and `use_cpu_path` raise."""
    if path != "auto":
        use_cpu_path(path)
    isa = ops.cpu_isa()
    _run_a_kernel("cpu")
    detail = f"built; {isa} instructions serve on {usable_cpus()} usable CPUs"
    if isa == "portable" and platform.machine() in ("x86_64", "AMD64"):
        detail += "; this CPU has no AVX2 with FMA and F16C, so they are slow"
    return Finding("CPU kernels", "ok", detail, facts={"isa": isa, "usable_cpus": usable_cpus()})


def _run_a_kernel(device: str) -> None:
    chosen = choose_greedy(torch.tensor([[1.0, 3.0, 2.0]], device=device)).item()
    if chosen != 1:
        raise RuntimeError(f"the kernel choose_greedy returned {chosen} instead of 1 on {device}")


def gpu(is_needed: bool, device: str = "cuda") -> Finding:
    """Uses a GPU through torch: `device`, which is the first one if it has no number."""
    driver = driver_version()
    try:
        check_device(device)
    except NeapError as error:
        advice = _advice_on_torch(torch.version.cuda, driver)
        has_driver = f"; the machine has NVIDIA's driver {driver}" if driver else ""
        return missing("GPU", is_needed, error.message + has_driver, advice)
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "driver": driver,
        "cuda": torch.version.cuda,
    }
    detail = (
        f"{facts['count']} x {properties.name}, capability {facts['capability']},"
        f" {properties.total_memory / 2**30:.0f} GiB, driver {driver or 'unknown'}, torch for CUDA {torch.version.cuda}"
    )
    advice = "" if has_bfloat16(torch.device(device)) else WITHOUT_BFLOAT16
    return Finding("GPU", "ok", detail, advice, facts)


WITHOUT_BFLOAT16 = (
    "it has no arithmetic in bfloat16: a .gguf file is served in float16. A checkpoint in bfloat16 is slow: set "
    "--dtype float16, or float32 if answers then end with NON_FINITE_LOGITS"
)


def _advice_on_torch(cuda: str | None, driver: str | None) -> str:
    """What to install where torch, built for a version of CUDA or for none, finds no GPU beside a driver, if any."""
    if cuda is None:
        return "install a torch that is built for CUDA (docs/running.md, TORCH_INDEX_URL)"
    if driver is None:
        return "install NVIDIA's driver; in a container, give it the GPU (docker run --gpus all)"
    if problem := driver_problem(cuda):
        return f"install a newer driver, or a torch for an older CUDA (docs/running.md, TORCH_INDEX_URL): {problem}"
    return ""


def cuda_kernels(is_needed: bool, device: str = "cuda") -> Finding:
    """Looks for CUDA kernels in the library, and runs one if there is a GPU.
    Raises what `ops.load` raises if it does not load."""
    name = "CUDA kernels"
    if not ops.is_available():
        return missing(name, is_needed, "the library is not built", "run `make build-ops`")
    built = cuda_build()
    if built is None:
        advice = "run `NEAP_BUILD_CUDA=1 make build-ops`, which fetches nvcc from PyPI where there is none"
        return missing(name, is_needed, "the library is built for CPUs only", advice)
    facts = {"cuda": built.cuda, "architectures": list(built.architectures)}
    detail = f"built with CUDA {built.cuda} for {', '.join(built.architectures)}"
    if not torch.cuda.is_available():
        return Finding(
            name, "ok", f"{detail}; not run, because there is no usable GPU", driver_problem(built.cuda), facts
        )
    try:
        check_device(device)
        check_card(torch.device(device))
        _run_a_kernel(device)
    except NeapError as error:
        return missing(name, is_needed, error.message)
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        return missing(name, is_needed, f"{detail}; they do not run on this GPU: {why}", "run `make build-ops` here")
    return Finding(name, "ok", f"{detail}; they run on this GPU", facts=facts)


def compiler() -> Finding:
    """What `make build-ops` on this machine builds, and with which nvcc. It matters to the next build alone."""
    name = "nvcc"
    try:
        toolkit, builds = find_toolkit(), described()
    except NeapError as error:
        return missing(name, False, f"`make build-ops` fails: {error.message}")
    if toolkit is None:
        return missing(name, False, f"none; `make build-ops` builds {builds}")
    facts = {"path": toolkit.nvcc, "cuda": toolkit.cuda}
    detail = f"{toolkit.nvcc}, CUDA {toolkit.cuda}; `make build-ops` builds {builds}"
    if problem := driver_problem(toolkit.cuda):
        return missing(name, False, detail, f"set CUDA_HOME to a CUDA toolkit that the driver runs: {problem}")
    of_torch = torch.version.cuda
    if of_torch is not None and of_torch.partition(".")[0] != toolkit.cuda.partition(".")[0]:
        detail += (
            f"; torch is built for CUDA {of_torch}, which does no harm: neap's kernels have a runtime of their own"
        )
    return Finding(name, "ok", detail, facts=facts)


def layer_compiler(is_needed: bool) -> Finding:
    """Compiles a file as torch.compile does on a GPU: Triton needs a C compiler and Python's headers for its
    launchers."""
    name = "torch.compile"
    if importlib.util.find_spec("triton") is None:
        return missing(name, is_needed, "the package triton is not installed; torch for CUDA needs it")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))), None)
    if compiler is None:
        advice = "install gcc or clang, or set CC"
        return missing(name, is_needed, "there is no C compiler", advice)
    with tempfile.TemporaryDirectory(prefix="neap-") as folder:
        source = Path(folder) / "probe.c"
        source.write_text("#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n")
        include = sysconfig.get_paths()["include"]
        command = [compiler, "-shared", "-fPIC", f"-I{include}", str(source), "-o", f"{folder}/probe.so"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        advice = "install Python's headers (python3-dev)" if "Python.h" in why else ""
        return missing(name, is_needed, f"{compiler} cannot build an extension module: {why}", advice)
    return Finding(name, "ok", f"{compiler} with Python's headers", facts={"compiler": compiler})
