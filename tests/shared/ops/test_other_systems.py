"""csrc/ for ARM64 and for macOS, on a machine that is neither: compiled by clang of PyPI's ziglang, and run by QEMU."""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.ops import build

# Compiling takes minutes.
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
# ARM64's C library as Debian's package libc6-arm64-cross has it, beside programs. To compile one takes minutes.
BESIDE_PROGRAMS = (Path(folder).parent / "aarch64-linux-gnu" for folder in os.get_exec_path())
LIBRARIES = next((folder for folder in BESIDE_PROGRAMS if (folder / "lib" / "libc.so.6").exists()), None)
PROGRAM, NO_CXX_LIBRARY = (Path(__file__).with_name(f"{name}.cpp") for name in ("kernels_alone", "no_cxx_library"))
# A processor that QEMU plays -> the widest set that it has.
PROCESSORS = {"cortex-a72": "neon", "neoverse-n1": "dotprod", "max": "i8mm"}

Emulated = Callable[[str], tuple[str, ...]]  # the command for a processor


def _linked(compiler: str, objects: dict[str, Path], program: Path, *others: Path, linking: str = "") -> Path:
    linked = [str(path) for name, path in objects.items() if name.startswith(("kernels_", "pack", "dispatch"))]
    for source in (PROGRAM, *others):
        linked.append(f"{program}_{source.stem}.o")
        _said("sh", "-c", f"{compiler} -std=c++20 -O2 -Werror -I{build.SOURCES} -c {source} -o {linked[-1]}")
    _said("sh", "-c", f"{compiler} {linking} {' '.join(linked)} -o {program}")
    return program


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode} of {' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def _results(*command: str) -> tuple[str, dict[str, str]]:
    """The set that ran, and case -> hash of its numbers."""
    name, *lines = _said(*command).splitlines()
    return name, dict(line.split(", ") for line in lines)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    if QEMU is None or LIBRARIES is None:
        pytest.skip("needs qemu-aarch64 and libc6-arm64-cross, which are packages of Debian and of no others")
    compiler = f"{build.cross_compiler('aarch64-linux-gnu')} -fno-exceptions"
    objects, program = build.cross_compile("aarch64-linux-gnu"), tmp_path_factory.mktemp("arm64") / "kernels"
    _linked(compiler, objects, program, NO_CXX_LIBRARY, linking="-nostdlib++")
    return lambda processor: (str(QEMU), "-L", str(LIBRARIES), "-cpu", processor, str(program))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same program with this machine's objects."""
    build.build()
    objects = {item.name: build.BUILD_DIR / f"{item.name}.o" for item in build.objects()}
    return _linked(build.find_compiler(), objects, tmp_path_factory.mktemp("native") / "kernels")


@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_arm_processor_runs_the_widest_set_that_it_has(processor: str, emulated: Emulated) -> None:
    """Every format in every height of tile against sums in double precision; a wider set is refused without a crash."""
    assert _results(*emulated(processor))[0] == PROCESSORS[processor]
    widest = list(PROCESSORS.values()).index(PROCESSORS[processor])
    for name in list(PROCESSORS.values())[widest + 1 :]:
        assert subprocess.run([*emulated(processor), name], check=False).returncode == 2


def test_the_sets_of_arm_give_the_bits_of_one_another_and_of_x86(emulated: Emulated, native: Path) -> None:
    """All but sums of bfloat16 pairs, which BFDOT rounds in an order of its own, and attention, whose softmax sums as
    many numbers at once as a vector has lanes."""
    found = {name: _results(*emulated("max"), name)[1] for name in PROCESSORS.values()}
    if platform.machine() == "x86_64" and subprocess.run([native, "avx2"], check=False, stdout=-3).returncode != 2:
        found["avx2"] = _results(str(native), "avx2")[1]
    for name, results in found.items():
        alike = {
            case: bits
            for case, bits in results.items()
            if not (name == "i8mm" and case.startswith("rounded") and "BF16" in case)
            and not (name == "avx2" and case.startswith("attention"))
        }
        assert len(alike) > 60
        assert alike.items() <= found["neon"].items(), name


@pytest.mark.parametrize("target", ["aarch64-macos", "x86_64-linux-gnu"])
def test_csrc_compiles_for_a_mac_and_by_clang(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does is seen without optimising. Other files than kernels clang compiles for ARM64, too."""
    monkeypatch.setattr(build, "COMMON_FLAGS", build.COMMON_FLAGS.replace("-O3", "-O0 -fno-sanitize=all"))
    if target.startswith("x86_64"):
        kernels = [item for item in build.objects(machine="x86_64") if item.source.startswith("cpu/")]
        monkeypatch.setattr(build, "objects", lambda *_, **__: kernels)
    assert all(path.exists() for path in build.cross_compile(target).values())
