"""Builds csrc/ into one library with g++ or clang++, and with nvcc if it is installed, through ninja:
`python -m shared.ops.build`.

It does not use `torch.utils.cpp_extension`. So it needs no setuptools, accepts every compiler, can build for GPUs with
a torch without CUDA, and compiles one kernel file once per instruction set. The library is written to
`shared/ops/_lib/`, objects to `build/neap_ops/`. Git ignores both.
"""

import argparse
import fcntl
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shared.errors import InvalidInput, NeapError, NotFound, PreconditionFailed
from shared.ops import LIBRARY
from shared.ops.toolkit import (
    FETCHED,
    Toolkit,
    driver_problem,
    fetching_problem,
    find_toolkit,
    wanted_toolkit,
    why_no_toolkit,
)

# Every generation since Turing. The last one also as PTX, for later generations.
ARCHITECTURES = "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"
# The same for an nvcc that knows no Blackwell, which CUDA 12.8 was the first to know.
BLACKWELL_SINCE, BEFORE_BLACKWELL = (12, 8), "7.5;8.0;8.6;8.9;9.0+PTX"


def wanted_architectures(cuda: str = FETCHED) -> str:
    """$TORCH_CUDA_ARCH_LIST, else the architectures of the GPUs in this machine, else ARCHITECTURES. `cuda`: nvcc's
    version. For GPUs that it does not know it makes PTX, which their driver compiles."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if listed:
        return ";".join(_items(listed))
    known = ARCHITECTURES if tuple(map(int, cuda.split("."))) >= BLACKWELL_SINCE else BEFORE_BLACKWELL
    if torch.cuda.is_available():
        present = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        newest = known.split(";")[-1]
        latest = float(newest.removesuffix("+PTX"))
        own = [f"{major}.{minor}" for major, minor in sorted(present)]
        return ";".join(dict.fromkeys(each if float(each) <= latest else newest for each in own))
    return known


def architecture_flags(listed: str) -> list[str]:
    """nvcc's flags for a list like "8.0;9.0+PTX". Spaces and commas separate, too.
    Raises `InvalidInput` for anything else."""
    flags = []
    for item in _items(listed):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", item)
        if match is None:
            raise InvalidInput(f"TORCH_CUDA_ARCH_LIST names {item!r}; it must look like 8.0 or 9.0+PTX")
        number = match[1] + match[2] + match[3]
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def _items(listed: str) -> list[str]:
    return re.split(r"[;,\s]+", listed.strip())


ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc"
BUILD_DIR = ROOT / "build" / "neap_ops"

# Structs of arguments are made with named fields. What is not named is 0.
COMMON_FLAGS = "-O3 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-missing-field-initializers"
# The compiler must not contract a * b + c on its own: see `fma` in csrc/include/simd.h.
# GCC warns of undefined vectors in its own AVX-512 header.
KERNEL_FLAGS = "-std=c++20 -ffp-contract=off -fno-math-errno -Wno-psabi -Wno-maybe-uninitialized"
# A spilled register is an error, because it makes a kernel slow without any other sign.
NVCC_FLAGS = "-std=c++17 -O3 -lineinfo --threads 2 -Xcompiler -fPIC,-fvisibility=hidden -Xptxas -warn-spills,-Werror"
# The oldest torch that the library supports. It may use no later symbols, and runs with every later torch.
TORCH_TARGET_VERSION = "0x020b000000000000"
_AVX512 = "-DNEAP_AVX512 -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mprefer-vector-width=512"
DRAFT_SOURCES = ("tables", "prediction", "confidence", "planner", "step", "api", "slots")
# csrc/cpu/dispatch.cpp asks the processor for the same sets.
ISA_FLAGS = {
    "portable": "",
    "avx2": "-DNEAP_AVX2 -mavx2 -mfma -mf16c",
    "avx512": _AVX512,
    "avx512bf16": f"{_AVX512} -DNEAP_AVX512BF16 -mavx512bf16 -DNEAP_AVX512VNNI -mavx512vnni",
    "neon": "-DNEAP_NEON",
    "dotprod": "-DNEAP_NEON -DNEAP_DOTPROD -march=armv8.2-a+dotprod",
    "i8mm": "-DNEAP_NEON -DNEAP_DOTPROD -DNEAP_I8MM -march=armv8.2-a+dotprod+i8mm+bf16",
}
# Sets whose kernels stand in another one's object, by that one's name.
WITHIN = {"amx": "avx512bf16"}
_X86, _ARM = ("portable", "avx2", "avx512", "avx512bf16"), ("neon", "dotprod", "i8mm")
# By the names that systems have for an architecture. Any other is served by portable code.
ISAS = {"x86_64": _X86, "AMD64": _X86, "aarch64": _ARM, "arm64": _ARM}


@dataclass(frozen=True)
class Object:
    name: str
    source: str
    flags: str
    rule: str = "compile"


def objects(toolkit: Toolkit | None = None, machine: str | None = None) -> list[Object]:
    """The object files for an architecture, this machine's if None, and with a toolkit, for GPUs."""
    include = Path(torch.__file__).parent / "include"
    architectures = wanted_architectures(toolkit.cuda) if toolkit else ""
    cuda, built = (" -DNEAP_WITH_CUDA", f"{toolkit.cuda} {architectures}") if toolkit else ("", "")
    binding = f"-std=c++20 -DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION} -isystem {include}{cuda}"
    isas = ISAS.get(machine or platform.machine(), ("portable",))
    return [
        Object("binding", "binding.cpp", f"{binding} -DNEAP_CUDA_BUILD='\"{built}\"'"),
        Object("weights", "weights.cpp", binding),
        Object("pack", "pack.cpp", "-std=c++20"),
        Object("attention", "attention.cpp", binding),
        Object("layer", "layer.cpp", binding),
        Object("decoder_layers", "decoder_layers.cpp", binding),
        Object("experts", "experts.cpp", binding),
        Object("tensor_table", "tensor_table.cpp", binding),
        Object("exits", "exits.cpp", binding),
        Object("chain", "chain.cpp", binding),
        Object("choices", "choices.cpp", binding),
        Object("slots", "slots.cpp", binding),
        *([Object("cuda", "cuda/kernels.cu", " ".join(architecture_flags(architectures)), "nvcc")] if toolkit else []),
        Object("dispatch", "cpu/dispatch.cpp", "-std=c++20"),
        *(Object(f"draft_{name}", f"draft/{name}.cpp", f"-std=c++20{cuda}") for name in DRAFT_SOURCES),
        *(Object(f"kernels_{isa}", "cpu/kernels.cpp", f"{KERNEL_FLAGS} {ISA_FLAGS[isa]}") for isa in isas),
    ]


def find_compiler() -> str:
    """$CXX, else g++, else clang++. Raises `NotFound`."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise NotFound("no C++ compiler: install g++ or clang++, or set CXX", reason="NO_COMPILER")


def find_ninja() -> str:
    """The ninja beside this interpreter, since the package depends on it, else the one on PATH. Raises `NotFound`."""
    beside = Path(sys.executable).parent / "ninja"
    ninja = str(beside) if beside.exists() else shutil.which("ninja")
    if ninja is None:
        raise NotFound("no ninja: pip install ninja", reason="NO_NINJA")
    return ninja


def ninja_file(
    compiler: str, toolkit: Toolkit | None, library: Path | None, build_dir: Path, machine: str | None = None
) -> str:
    """The text of build.ninja, which builds `library` with `compiler` and, for GPUs, with `toolkit`. Without a library,
    it builds the objects alone."""
    torch_lib = Path(torch.__file__).parent / "lib"
    libraries = f"-L{torch_lib} -ltorch -ltorch_cpu -lc10"
    if sys.platform == "linux":
        # libtorch.so loads the GPU part of torch. It defines no symbols itself, so the linker would leave it out.
        libraries = libraries.replace("-ltorch ", "-Wl,--no-as-needed -ltorch -Wl,--as-needed ")
    if toolkit:
        libraries += f" -L{toolkit.libraries} -lcudart_static -lrt -ldl -lpthread"
    lines = [
        "rule compile",
        f"  command = {compiler} -MMD -MF $out.d {COMMON_FLAGS} $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        *(
            [
                "rule nvcc",
                f"  command = {toolkit.nvcc} -ccbin {compiler} -MMD -MF $out.d {NVCC_FLAGS} $flags -c $in -o $out",
                "  depfile = $out.d",
                "  deps = gcc",
            ]
            if toolkit
            else []
        ),
        "rule link",
        # Linked under another name and moved, so that a process that has loaded the old library keeps it intact.
        f"  command = {compiler} -shared -o $out.new $in {libraries} && mv $out.new $out",
    ]
    built = []
    for item in objects(toolkit, machine):
        path = build_dir / f"{item.name}.o"
        lines += [f"build {path}: {item.rule} {SOURCES / item.source}", f"  flags = {item.flags}"]
        built.append(str(path))
    if library:
        lines.append(f"build {library}: link {' '.join(built)}")
    return "\n".join((*lines, ""))


def build(library: Path = LIBRARY, build_dir: Path = BUILD_DIR, *, verbose: bool = False) -> Path:
    """Builds what is out of date, and returns the library's path. Several processes may call it at once.

    Raises `NotFound` if there is no compiler or ninja, and `PreconditionFailed` with the compiler's output if compiling
    fails.
    """
    if not SOURCES.is_dir():
        raise NotFound(f"{SOURCES} does not exist: build from a checkout", reason="NO_SOURCES")
    library.parent.mkdir(parents=True, exist_ok=True)
    said = _run_ninja(build_dir, lambda: ninja_file(find_compiler(), wanted_toolkit(), library, build_dir))
    if verbose:
        print(said, end="")
    return library


def _run_ninja(build_dir: Path, text_of: Callable[[], str]) -> str:
    """Runs ninja on a text, and returns what it prints. Raises `PreconditionFailed` if that fails."""
    build_dir.mkdir(parents=True, exist_ok=True)
    with (build_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text, description = text_of(), build_dir / "build.ninja"
        if not description.exists() or description.read_text() != text:
            description.write_text(text)
        result = subprocess.run([find_ninja(), "-C", str(build_dir)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise PreconditionFailed(f"building csrc/ failed:\n{result.stdout}{result.stderr}", reason="OPS_BUILD_FAILED")
    return result.stdout


def cross_compiler(target: str) -> str:
    """The command of clang for a system such as "aarch64-linux-gnu" or "aarch64-macos", from PyPI's ziglang, which has
    the headers and C libraries of all of them. Raises `NotFound`."""
    if importlib.util.find_spec("ziglang") is None:
        raise NotFound("no compiler for other systems: pip install ziglang", reason="NO_COMPILER")
    cache = BUILD_DIR.parent / "zig"
    return f"ZIG_GLOBAL_CACHE_DIR={cache} ZIG_LOCAL_CACHE_DIR={cache} {sys.executable} -m ziglang c++ -target {target}"


def cross_compile(target: str) -> dict[str, Path]:
    """Compiles csrc/ for the CPU of another system: name -> object. A warning is an error. Nothing is linked, because
    torch's libraries for that system are not here; its headers are the same for all. Raises as `build`."""
    build_dir, machine = BUILD_DIR.parent / target, target.partition("-")[0]
    # As strict as g++, which is not tried here.
    strict = "-Werror -Wno-unknown-warning-option -flax-vector-conversions=none"
    text = ninja_file(f"{cross_compiler(target)} {strict}", None, None, build_dir, machine)
    # zig has its own way of naming architectures.
    _run_ninja(build_dir, lambda: text.replace("-march=armv8.2-a", "-mcpu=generic+v8_2a"))
    return {item.name: build_dir / f"{item.name}.o" for item in objects(machine=machine)}


def described() -> str:
    """The devices that a build on this machine is for, in words."""
    toolkit = find_toolkit()
    if toolkit is None and (why := why_no_toolkit()):
        return f"for the CPU only: {why}"
    cuda, fetched = (toolkit.cuda, "") if toolkit else (FETCHED, f", with nvcc {FETCHED} from PyPI")
    problem = driver_problem(cuda) if toolkit else fetching_problem()
    return f"for the CPU and for GPUs of {wanted_architectures(cuda)}{fetched}{problem and f', but {problem}'}"


def main() -> int:
    """The command line. Builds, and prints the library's path.
    If that fails, prints the compiler's output and returns 1."""
    parser = argparse.ArgumentParser(description=build.__doc__)
    parser.add_argument("--verbose", action="store_true", help="print ninja's output")
    parser.add_argument("--target", help="only compile, for another system, such as aarch64-linux-gnu")
    arguments = parser.parse_args()
    try:
        if arguments.target:
            print(*cross_compile(arguments.target).values(), sep="\n")
            return 0
        print(f"csrc is built {described()}", file=sys.stderr)
        print(build(verbose=arguments.verbose))
    except NeapError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
