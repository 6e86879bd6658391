"""Which architectures the kernels are built for, and that none is silently left out."""

import struct
import subprocess
from pathlib import Path

import pytest
import torch

from shared.errors import InvalidInput, PreconditionFailed
from shared.ops import build
from shared.ops.cards import cuda_build
from shared.ops.toolkit import code_runs_on
from tests.tiers import tiered


def test_without_a_gpu_every_architecture_is_built_and_ptx_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = build.architecture_flags(build.wanted_architectures())
    names = [flag.split(",code=")[1] for flag in flags]
    numbers = (75, 80, 86, 89, 90, 100, 120)
    assert names == [*(f"sm_{number}" for number in numbers), "compute_120"]


def test_with_a_gpu_only_its_own_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert build.wanted_architectures() == "9.0"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a+PTX")
    assert build.architecture_flags(build.wanted_architectures()) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]
    with pytest.raises(InvalidInput, match="'Hopper'"):
        build.architecture_flags("8.0;Hopper")


@pytest.mark.parametrize(
    ("cuda", "capability", "wanted"),
    [
        ("13.0", None, build.ARCHITECTURES),
        ("12.6", None, "7.5;8.0;8.6;8.9;9.0+PTX"),
        ("12.8", (12, 0), "12.0"),
        ("12.6", (12, 0), "9.0+PTX"),
        ("12.6", (7, 5), "7.5"),
    ],
)
def test_an_nvcc_that_knows_no_blackwell_makes_ptx_for_it(
    monkeypatch: pytest.MonkeyPatch, cuda: str, capability: tuple[int, int] | None, wanted: str
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert build.wanted_architectures(cuda) == wanted
    assert code_runs_on(wanted.split(";"), capability or (12, 1))


needs_nvcc = pytest.mark.skipif(build.find_toolkit() is None, reason="there is no nvcc")


@needs_nvcc
def test_a_spilled_register_ends_the_build(tmp_path: Path) -> None:
    """A kernel with more live sums than a thread has registers."""
    (tmp_path / "spill.cu").write_text(
        "__global__ void __launch_bounds__(1024) f(const float* x, float* y) {\n"
        "  float sums[200];\n#pragma unroll\n  for (int i = 0; i < 200; ++i) sums[i] = x[i];\n"
        "  for (int n = 0; n < 99; ++n) {\n#pragma unroll\n"
        "    for (int i = 0; i < 200; ++i) sums[i] = sums[i] * sums[(i + 7) % 200] + x[n];\n  }\n"
        "#pragma unroll\n  for (int i = 0; i < 200; ++i) y[i] = sums[i];\n}\n"
    )
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        flags = build.architecture_flags("8.0")[0]
        patch.setattr(build, "SOURCES", tmp_path)
        patch.setattr(build, "objects", lambda *_: [build.Object("s", "spill.cu", flags, "nvcc")])
        with pytest.raises(PreconditionFailed, match="spilled"):
            build.build(tmp_path / "lib" / "out.so", tmp_path / "objects")


def fatbin_contents(content: bytes) -> set[str]:
    """What nvcc has put into a file, as cuobjdump lists it: "sm_80" for machine code, "compute_80" for PTX."""
    found, start = set(), 0
    while (start := content.find(FATBIN_MAGIC, start)) >= 0:
        header_bytes, num_bytes = struct.unpack_from("<HQ", content, start + 6)
        place = start + header_bytes
        end = place + num_bytes
        start += len(FATBIN_MAGIC)
        while place < end and end <= len(content):
            kind, _, entry_header, entry_bytes = struct.unpack_from("<HHIQ", content, place)
            (number,) = struct.unpack_from("<I", content, place + 28)
            found.add({1: "compute_", 2: "sm_"}[kind] + str(number))
            place += entry_header + entry_bytes
    return found


FATBIN_MAGIC = struct.pack("<IH", 0xBA55ED50, 1)


@needs_nvcc
@pytest.mark.parametrize("listed", tiered(["8.0 9.0+PTX", "7.5"], {"8.0 9.0+PTX"}))
def test_what_is_listed_is_what_nvcc_makes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listed: str) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    (tmp_path / "one.cu").write_text("__global__ void f(float* x) { *x += 1; }\n")
    toolkit = build.find_toolkit()
    assert toolkit is not None
    flags = build.architecture_flags(build.wanted_architectures(toolkit.cuda))
    made = tmp_path / "one.fatbin"
    subprocess.run([toolkit.nvcc, "-fatbin", *flags, str(tmp_path / "one.cu"), "-o", str(made)], check=True)
    expected = {"8.0 9.0+PTX": {"sm_80", "sm_90", "compute_90"}, "7.5": {"sm_75"}}
    assert fatbin_contents(made.read_bytes()) == expected[listed]


@needs_nvcc
def test_the_library_carries_the_kernels_and_still_loads_without_a_gpu() -> None:
    library = build.build()
    content = library.read_bytes()
    for name in ("route_kernel", "draft_block_kernel", "choose_kernel"):
        assert name.encode() in content
    assert torch._C._dispatch_has_kernel_for_dispatch_key("neap::route", "CUDA")
    built, toolkit = cuda_build(), build.find_toolkit()
    assert built is not None
    assert toolkit is not None
    names = {flag.split(",code=")[1] for flag in build.architecture_flags(";".join(built.architectures))}
    # torch's own code is in no library of ours.
    assert fatbin_contents(content) == names
    assert (built.cuda, ";".join(built.architectures)) == (toolkit.cuda, build.wanted_architectures(toolkit.cuda))
